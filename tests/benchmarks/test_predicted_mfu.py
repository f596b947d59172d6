# SPDX-License-Identifier: Apache-2.0
"""The tables of predicted steps: every layout and variant is asked, and told as it answers."""

from benchmarks.fused_launches import FLAGS
from benchmarks.predicted_mfu import COMPARED, LAYOUTS, TITAN, VARIANTS, changes, gains, mfu
from forecast.device_file import read_device
from training.flags.parse import parse


def answer(asked):
    def report(tree, flags, triton, world):
        words = [*FLAGS, *flags, "--dry-run"]
        asked.append((parse(words, world), triton))
        ring = "--tp-comm-overlap=ring" in flags
        return {
            "launches": [{"count": 1000}, {"count": 234}],
            "time": {
                "step_seconds": 0.2 if ring else 0.25,
                "mfu": 0.4,
                "bound_by": "matmul",
                "bound_seconds": 0.1,
                "exposed_seconds": {"tp": 0.01 if ring else 0.02, "world": 1e-6},
            },
        }

    return report


def test_every_layout_has_every_variant():
    asked = []
    lines = list(mfu([], answer(asked)))
    assert len(lines) == 2 + len(LAYOUTS) * len(VARIANTS)
    recipes = [(config.float8.fp8_recipe, triton) for config, triton in asked[: len(VARIANTS)]]
    assert recipes == [(None, False), (None, True), ("tensorwise", True), ("blockwise", True)]
    assert {config.parallel.tensor_model_parallel_size for config, _ in asked} == {1, 8}
    assert lines[2].endswith("| 1,234 | 250 | 40.0% | matmul | 100 | tp 20 |")


def test_gains_stand_beside_those_of_torchtitan():
    asked = []
    lines = list(gains([], answer(asked)))
    assert len(asked) == 2 * len(TITAN)
    assert lines[2] == "| bf16 | 250.0 | 20.0 | 200.0 | 10.0 | +25.0% | +9.2% (597 to 652) |"
    assert lines[5].endswith("not published |")


def test_changes_are_what_each_number_put_back_would_predict(tmp_path):
    def report(tree, flags, triton, world):
        seconds = 0.3 if tree == tmp_path else 0.2
        file = next((word.partition("=")[2] for word in flags if "rehearse-device" in word), "")
        if file:
            device = read_device(file)
            seconds = 0.25 if device["attention.cudnn.forward"] < 0.3 else 0.19
        ends = [{"step_seconds": s, "mfu": 0.1 / s} for s in (0.16, seconds)]
        time = {"step_seconds": seconds, "mfu": 0.1 / seconds, "range": ends}
        return {"launches": [{"count": 1000 if tree == tmp_path else 900}], "time": time}

    lines = list(changes([], tmp_path, report))
    assert len(lines) == 2 + len(COMPARED)
    what = "| one GPU | 1,000 to 900 | 300, 33.3% | 200, 50.0% | 160, 62.5% | -50 | +10 | -60 |"
    assert lines[2] == what
