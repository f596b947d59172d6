# SPDX-License-Identifier: Apache-2.0
"""A run of three stages: another blend, then longer rows with another rotary base and a decay.

It is killed in each stage and goes on in the same layout or another, and has the losses of a run
that never stopped but between stages. Stages change inside of a ramp of the batch size, and at a
save. docs/stages.md has such a run.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mpu.grid import Grid
from tests.launcher import Launcher, Result
from training.checkpoint import find_latest
from training.data.build import build_datasets
from training.data.indexed import IndexedWriter, token_dtype
from training.data.tokenizer import build_tokenizer
from training.flags.parse import parse
from training.run.same_run import changes, edited

SETS = {"web": 70, "code": 40, "good": 50, "books": 30, "held": 5}
PATIENCE = {"grace": 0.5, "unwind": 0.5}
FLAGS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --device cpu
    --seq-length 16 --tokenizer-type NullTokenizer --vocab-size 99 --fp64 --lr 1e-2
    --train-iters 18 --lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style linear
    --log-interval 1 --eval-interval 6 --eval-iters 1 --save-interval 2 --num-workers 1
    --save {dir}/saved --load {dir}/saved --valid-data-path held"""
RAMP = "0:4 500:8"
LAYOUTS = {
    "one rank": (1, ""),
    "tp 2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "dp 2, zero 3": (2, "--zero-stage 3"),
    "cp 2": (2, "--context-parallel-size 2"),
}
POINTS = ("data", "forward", "backward", "gradient sums", "update")


def stages(folder: Path, **third: Any) -> dict[str, Any]:
    """Return the stages: from steps 1, 7 and 11 on with RAMP."""
    at = {name: str(folder / name) for name in SETS}
    return {
        "stages": [
            {"name": "web", "start_tokens": 0,
             "train_data_path": ["0.8", at["web"], "0.2", at["code"]]},
            {"name": "better", "start_tokens": 384,
             "train_data_path": ["0.4", at["web"], "0.6", at["good"]]},
            {"name": "long", "start_tokens": 900, "train_data_path": [at["books"], at["good"]],
             "seq_length": 48, "rotary_base": 5e5, **third},
        ]
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    for k, (name, documents) in enumerate(SETS.items()):
        with IndexedWriter(str(made / name), token_dtype(99)) as writer:
            for i in range(documents):
                writer.add([(7 * j * j * (k + 1) + i) % 90 for j in range(11 * i % 53 + 2)])
    (made / "stages.json").write_text(json.dumps(stages(made)))
    return made


def start(
    launcher: Launcher, data: Path, layout: str, file: str = "stages.json", more: str = "",
    folder: Path | None = None, **job: Any,
) -> Result:  # fmt: skip
    ranks, flags = LAYOUTS[layout]
    argv = FLAGS.replace(" held", f" {data}/held").split()
    argv += ["--data-stages", str(data / file), "--step-batch-size-schedule", RAMP]
    return launcher.run(
        ranks, [*argv, *flags.split(), *more.split()], folder, monitor=PATIENCE, **job
    )


def losses(result: Result) -> dict[int, tuple[Any, ...]]:
    """Return what the log says of each step last: loss, norm, rate, samples, tokens."""
    keys = ("loss", "grad_norm", "lr", "consumed_samples", "consumed_tokens")
    rows = [row for row in result.rows() if "loss" in row]
    return {row["iteration"]: tuple(row[key] for key in keys) for row in rows}


@pytest.fixture(scope="module")
def whole(launcher: Launcher, folder: Path) -> Result:
    """A run that stops only where the length of rows changes."""
    first = start(launcher, folder, "one rank")
    assert first.codes == [75], first.said(0)
    assert "as stage long is next: the same command continues" in first.said(0, "out")
    last = start(launcher, folder, "one rank", folder=first.folder)
    assert last.codes == [0], last.said(0)
    return last


def test_samples_and_tokens_are_exact(whole):
    found = losses(whole)
    assert sorted(found) == list(range(1, 19))
    #         stage        steps      batch x length
    sizes = [4 * 16] * 8 + [8 * 16] * 4 + [8 * 48] * 6
    samples = [4] * 8 + [8] * 10
    for step in found:
        consumed = found[step][3:]
        assert consumed == (sum(samples[:step]), sum(sizes[:step])), step
    assert found[13][2] == 1e-2 > found[15][2] > found[18][2] > 0
    state = json.loads((whole.folder / "saved/step_00000018/state.json").read_text())
    assert state["consumed_tokens"] == sum(sizes)
    assert [s["first_sample"] for s in state["stages"]] == [0, 24, 64]
    assert state["hf_config"]["rope_theta"] == 5e5
    # the save of every second step and that at the end of a stage are one
    assert "step_00000012" in whole.saved()


def killed_in_each(
    launcher: Launcher, data: Path, ways: tuple[str, str, str, str], points: tuple[str, str, str]
) -> Result:
    """Kill a run in each of its stages; ways: the layouts of the starts between."""
    result, folder = None, None
    # iterations 4, 9 and 14, by the calls of a process that begins at 0, 2 and 12
    for way, point, step in zip(ways, points, (4, 7, 2), strict=False):
        calls = {"forward": 2, "backward": 4}.get(point, 1)
        fault = {"point": point, "rank": -1, "call": max(1, step * calls), "how": "kill"}
        result = start(launcher, data, way, folder=folder, fault=fault)
        folder = result.folder
        if 75 in result.codes:
            result = start(launcher, data, way, folder=folder, fault=fault)
        assert -9 in result.codes, (way, point, result.said(0))
    while 0 not in (result := start(launcher, data, ways[-1], folder=folder)).codes:
        assert set(result.codes) == {75}, result.said(0)
    return result


def hold(result: Result, whole: Result, tolerance: float) -> None:
    """Compare the losses of a run with those of one that never stopped."""
    found, wanted = losses(result), losses(whole)
    assert found.keys() == wanted.keys()
    for step, row in wanted.items():
        assert found[step][2:] == row[2:], step
        assert found[step][:2] == pytest.approx(row[:2], rel=tolerance), step


@pytest.mark.prove
def test_a_stage_of_other_rows_begins_in_a_new_process_though_the_step_before_is_skipped(
    launcher, folder, whole
):
    """Steps 12 and 13, of two stages: both would need rows of another length."""
    more = "--iterations-to-skip 12 13"
    first = start(launcher, folder, "one rank", more=more)
    assert first.codes == [75], first.said(0)
    assert "as stage long is next: the same command continues" in first.said(0, "out")
    assert first.saved()[-1] == "step_00000012" and sorted(losses(first)) == [*range(1, 12)]
    last = start(launcher, folder, "one rank", more=more, folder=first.folder)
    assert last.codes == [0], last.said(0)
    assert sorted(losses(last)) == [*range(1, 12), *range(14, 19)]


def test_killed_in_each_stage_in_one_layout(launcher, folder, whole):
    hold(killed_in_each(launcher, folder, ("one rank",) * 4, ("update",) * 3), whole, 0)


@pytest.mark.prove
def test_killed_in_each_stage_and_resumed_in_two_layouts(launcher, folder, whole):
    ways = ("tp 2", "one rank", "tp 2", "pp 2")
    hold(killed_in_each(launcher, folder, ways, ("update",) * 3), whole, 1e-10)


@pytest.mark.prove
@pytest.mark.parametrize("layout, point", [*zip(LAYOUTS, POINTS, strict=True)])
def test_killed_at_each_point(launcher, folder, whole, layout, point):
    hold(killed_in_each(launcher, folder, (layout,) * 4, (point,) * 3), whole, 1e-10)


def test_a_file_that_was_edited(launcher, folder, whole, tmp_path):
    """What has begun must not change; what has not may, with a line."""
    argv = FLAGS.replace(" held", f" {folder}/held").replace("{dir}", str(tmp_path)).split()
    argv += ["--step-batch-size-schedule", RAMP, "--data-stages", str(folder / "edited.json")]
    found = find_latest(whole.folder / "saved", Grid(), step=10)
    tokenizer = build_tokenizer("NullTokenizer", None, 99)

    def said(change: Any, words: list[str] = argv) -> list[tuple[str, str]]:
        made = stages(folder)
        change(made["stages"])
        (folder / "edited.json").write_text(json.dumps(made))
        config = parse(words, 1)
        corpora = build_datasets(config, tokenizer, lambda line: None)["train"].corpora
        digests = {"stage_corpora": json.dumps(corpora), "corpus_digest": ""}
        told = [*changes(found, config, digests)]
        return told or [("may", line) for line in edited(found, config, digests)]

    def one(change: Any) -> tuple[str, str]:
        ((what, line),) = said(change)
        return what, line.removeprefix(f"{found.directory} ")

    assert said(lambda s: None) == []
    other = stages(folder)["stages"][1]["train_data_path"]
    assert one(lambda s: s[0].update(train_data_path=other)) == (
        "data", "was made with other data in stage web",
    )  # fmt: skip
    assert said(lambda s: s[1].update(start_tokens=320))[0][1].endswith(
        "has first_sample 24 in stage better, not 20"
    )
    assert one(lambda s: s[1].update(rotary_base=7.0)) == (
        "rope", "has rotary_base 10000.0 in stage better, not 7.0",
    )  # fmt: skip
    end = "has begun stages web, better, and this run would have begun web"
    assert said(lambda s: s.pop(1))[-1][1].endswith(end)
    assert one(lambda s: s[2].update(start_tokens=1200, name="later"))[0] == "may"
    assert one(lambda s: s.pop(2))[0] == "may"
    grown = ["0:4 300:8" if word == RAMP else word for word in argv]
    assert ("batch", f"{found.directory} was made with batch sizes [first sample, size] [[0, 4], "
            "[32, 8]]; this run has [[0, 4], [20, 8]]") in said(lambda s: None, grown)  # fmt: skip
    late = ["0:4 500:8 900:16" if word == RAMP else word for word in argv]
    assert not [what for what, _ in said(lambda s: None, late) if what != "may"]

    (folder / "edited.json").write_text(
        json.dumps(stages(folder, train_data_path=[f"{tmp_path}/no"]))
    )
    result = start(launcher, folder, "one rank", "edited.json")
    assert result.codes == [2] and f"stage 'long': {tmp_path}/no: there is no" in result.said(0)


@pytest.mark.prove
def test_a_branch_with_its_own_decay(launcher, folder, whole):
    """From a save of another run, into a folder of its own; the trunk is only read."""
    trunk = whole.folder / "saved"
    before = {p: p.stat().st_mtime_ns for p in sorted(trunk.rglob("*"))}
    more = f"--branch-from {trunk} --ckpt-step 8 --train-iters 12 --lr-wsd-decay-iters 4"
    first = start(launcher, folder, "one rank", more=f"{more} --exit-interval 10")
    assert first.codes == [0], first.said(0)
    said = first.said(0, "out")
    assert "branching off from" in said and "--train-iters" in said
    assert "the learning rate was 0.01 at iteration 8" in said and "is 0.01 at iteration 9" in said
    last = start(launcher, folder, "tp 2", more=more, folder=first.folder)
    assert last.codes == [0, 0], last.said(0)
    found, wanted = losses(last), losses(whole)
    assert sorted(found) == [9, 10, 11, 12]
    assert found[9][:2] == wanted[9][:2] and found[12][2] == pytest.approx(2.5e-3)
    assert found[12][3:] == wanted[12][3:]
    state = json.loads((last.folder / "saved/step_00000012/state.json").read_text())
    origin = state["branched_from"]
    assert origin["directory"] == str(trunk / "step_00000008") and origin["iteration"] == 8
    assert before == {p: p.stat().st_mtime_ns for p in sorted(trunk.rglob("*"))}
    into = start(launcher, folder, "one rank", more=f"--branch-from {first.folder}/saved",
                 folder=first.folder)  # fmt: skip
    assert into.codes == [2] and "--save is the same directory" in into.said(0)
