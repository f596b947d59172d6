# SPDX-License-Identifier: Apache-2.0
"""Flags that steer the loop, each tested by what a run of a few steps on one process writes."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pretrain_llama
from mpu import native
from mpu.grid import Grid
from training.checkpoint import find_latest
from training.faults.monitor import FailureMonitor
from training.run import stop

ROOT = Path(pretrain_llama.__file__).parent
FLAGS = """
    --mock-data --vocab-size 100 --num-layers 1 --hidden-size 32 --num-attention-heads 2
    --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --log-interval 1
    --device cpu --num-workers 0
"""


def run(tmp_path: Path, more: str, code: int = 0) -> list[dict]:
    """Run and return the rows of its JSON log."""
    log = tmp_path / "log.json"
    if log.exists():
        log.unlink()
    words = [*FLAGS.split(), "--log-json", str(log), *more.format(tmp=tmp_path).split()]
    assert pretrain_llama.main(words) == code
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_row_of_the_log(tmp_path, capsys):
    rows = run(tmp_path, "--train-iters 3 --log-params-norm --log-interval 2")
    assert [row["iteration"] for row in rows] == [2, 3]  # the last one always
    keys = "loss grad_norm lr tokens_per_second step_seconds peak_memory_bytes params_norm mfu"
    for row in rows:
        assert {*keys.split(), "consumed_samples", "data_wait_seconds"} <= row.keys()
        assert row["params_norm"] > 1 and row["loss"] == pytest.approx(4.6, abs=0.5)
    assert rows[1]["consumed_samples"] == 12
    said = capsys.readouterr().out
    assert "1 ranks" in said and "3/3 | loss" in said and "MFU" in said


@pytest.mark.prove
def test_without_asserts_a_run_has_the_same_bits(tmp_path):
    """python -O, or PYTHONOPTIMIZE in a container, leaves them out."""
    more = "--train-iters 2 --optimizer muon"
    with_them = [row["loss"] for row in run(tmp_path, more)]
    words = [*FLAGS.split(), *more.split(), "--log-json", str(tmp_path / "other.json")]
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run([sys.executable, "-O", ROOT / "pretrain_llama.py", *words], check=True, env=env)
    rows = (tmp_path / "other.json").read_text().splitlines()
    assert [json.loads(row)["loss"] for row in rows] == with_them


def test_profile_writes_a_trace_of_the_steps_asked_for(tmp_path):
    more = "--train-iters 6 --profile --profile-step-start 2 --profile-step-end 4"
    run(tmp_path, more + " --tensorboard-dir {tmp}/tb")
    (trace,) = (tmp_path / "tb").glob("rank0*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    steps = {e["name"] for e in events if str(e.get("name")).startswith("ProfilerStep#")}
    assert len(steps) == 2 and any(e.get("name") == "AllGatherMatmul" for e in events)
    assert list((tmp_path / "tb").glob("events.out.tfevents.*")), "no TensorBoard events"


def test_exit_interval_saves_and_a_resume_goes_on(tmp_path):
    undisturbed = run(tmp_path, "--train-iters 7")
    folder = "--train-iters 7 --save {tmp}/saved --load {tmp}/saved --exit-interval 3"
    parts = [run(tmp_path, folder) for _ in range(3)]
    assert [[row["iteration"] for row in part] for part in parts] == [[1, 2, 3], [4, 5, 6], [7]]
    losses = [row["loss"] for part in parts for row in part]
    assert losses == [row["loss"] for row in undisturbed]
    steps = sorted(p.name for p in (tmp_path / "saved").glob("step_*"))
    assert steps == ["step_00000003", "step_00000006", "step_00000007"]
    for more, size in (("", 1 << 21), (" --ddp-bucket-size 5000", 5000)):  # default, or asked for
        run(tmp_path, f"--train-iters 1 --save {{tmp}}/{size}{more}")
        assert find_latest(str(tmp_path / str(size)), Grid()).state["ddp_bucket_size"] == size


def test_exit_duration(tmp_path, monkeypatch):
    monkeypatch.setattr(stop.time, "monotonic", iter(range(0, 100_000, 40)).__next__)
    rows = run(tmp_path, "--train-iters 50 --exit-duration-in-mins 5")
    assert 2 <= len(rows) < 10


def test_evaluation_and_the_phases_of_a_run(tmp_path, monkeypatch):
    entered, enter = [], FailureMonitor.enter
    noted = lambda monitor, *words: (entered.append(words), enter(monitor, *words))  # noqa: E731
    monkeypatch.setattr(FailureMonitor, "enter", noted)
    more = "--train-iters 5 --eval-interval 2 --eval-iters 3 --save {tmp}/saved --save-interval 2"
    rows = run(tmp_path, more)
    of_the_second = [words for words in entered if words[1].endswith("iteration 2")]
    assert of_the_second == [
        ("data", "reading the data of iteration 2"),
        ("step", "iteration 2"),
        ("evaluation", "the data of the evaluation after iteration 2"),
        ("save", "saving iteration 2"),
    ]
    found = [row["iteration"] for row in rows if "validation_loss" in row]
    assert found == [2, 4, 5]
    assert [row["iteration"] for row in rows if "test_loss" in row] == [5]


def test_manual_gc_and_determinism_change_no_number(tmp_path):
    plain = run(tmp_path, "--train-iters 3")
    try:
        more = run(
            tmp_path, "--train-iters 3 --manual-gc --manual-gc-interval 2 --deterministic-mode"
        )
        assert not gc.isenabled() and torch.are_deterministic_algorithms_enabled()
    finally:
        gc.enable()
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert [r["loss"] for r in more] == [r["loss"] for r in plain]


def test_a_batch_size_that_grows(tmp_path):
    log = tmp_path / "log.json"
    words = [*FLAGS.split(), "--log-json", str(log), "--train-samples", "32"]
    words[words.index("--global-batch-size") : words.index("--global-batch-size") + 2] = []
    words += ["--step-batch-size-schedule", f"0:4 {16 * 8}:8"]
    assert pretrain_llama.main(words) == 0
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["consumed_samples"] for row in rows] == [4, 8, 16, 24, 32]


def test_recomputation_changes_no_bit(tmp_path):
    plain = run(tmp_path, "--train-iters 3")
    for how in ("selective", "full --recompute-method uniform --recompute-num-layers 1"):
        again = run(tmp_path, f"--train-iters 3 --recompute-granularity {how}")
        assert [r["loss"] for r in again] == [r["loss"] for r in plain]


def test_without_the_compiled_library_a_run_says_so_and_follows(tmp_path, capsys, monkeypatch):
    fused = run(tmp_path, "--train-iters 4")
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "PATH", tmp_path / "weft_native.so")
    plain = run(tmp_path, "--train-iters 4")
    assert "weft_native.so is not built: run `make setup`" in capsys.readouterr().out
    assert [r["loss"] for r in plain] == pytest.approx([r["loss"] for r in fused], rel=1e-5)


def test_a_dry_run_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    words = [*FLAGS.split(), "--train-iters", "3", "--dry-run", "--log-json", str(tmp_path / "x")]
    words += ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--micro-batch-size", "1"]
    assert pretrain_llama.main(words) == 0
    said = capsys.readouterr().out
    assert "TP 2 x CP 1 x DP 4 x PP 1 = 8 ranks" in said and not list(tmp_path.iterdir())
