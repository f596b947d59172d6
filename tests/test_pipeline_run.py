# SPDX-License-Identifier: Apache-2.0
"""The program over a pipeline logs and saves the bits that one rank logs and saves.

Every run here trains on the same small documents, with masks that follow them, a batch that grows
and evaluations on the way. tests/launcher.py starts the ranks. fp32, one thread.
"""

import filecmp
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launcher import Launcher, Result
from tests.saved import check_equal, tensors
from tools import checkpoint, generate
from training.data.indexed import IndexedWriter

LATER = pytest.mark.prove
UNTIED = " --untie-embeddings-and-output-weights"
STEPS = 6
MODEL = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --group-query-attention --num-query-groups 2
    --data-path {{data}} --split 8,1,1 --tokenizer-type NullTokenizer --vocab-size 200
    --reset-position-ids --reset-attention-mask --eod-mask-loss --num-workers 0 --device cpu
    --train-iters {STEPS} --lr 1e-2 --clip-grad 0.5 --eval-interval 3 --eval-iters 2
    --log-interval 1 --micro-batch-size 2 --save-interval 3 --save {{dir}}/saved
"""
GROWS = f' --step-batch-size-schedule "0:8 {16 * 32}:16"'  # 4, then 8 micro-batches of 2 at dp 1
P = " --pipeline-model-parallel-size"
TP2 = " --tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {  # name: (ranks, flags)
    "one rank": (1, ""),
    "1f1b": (2, f"{P} 2"),
    "gpipe": (2, f"{P} 2 --pipeline-schedule gpipe"),
    "interleaved": (2, f"{P} 2 --num-virtual-stages-per-pipeline-rank 2"),
    "zb-v": (2, f"{P} 2 --pipeline-schedule zb-v"),
    "v-half": (2, f"{P} 2 --pipeline-schedule v-half"),
    "zb-h1": (2, f"{P} 2 --pipeline-schedule zb-h1"),
    "recompute": (2, f"{P} 2 --pipeline-schedule zb-v --recompute-granularity full"),
    "uneven": (2, f"{P} 2 --pipeline-model-parallel-layout E|t*3||tL"),
    "four": (4, f"{P} 4"),
    "four in V": (4, f"{P} 4 --pipeline-schedule zb-v"),
    "tp": (2, TP2),
    "tp, interleaved": (4, f"{TP2}{P} 2 --num-virtual-stages-per-pipeline-rank 2"),
    "dp": (2, ""),
    "dp, zb-v": (4, f"{P} 2 --pipeline-schedule zb-v"),
    "tp, pp first": (4, f"{TP2}{P} 2 --rank-order pp-tp-dp-cp"),
    "dp, pp first": (4, f"{P} 2 --use-tp-pp-dp-mapping --pipeline-schedule zb-v"),
}


class Runs:
    """Runs of the program by the name of a layout; one that many compare with is made once."""

    def __init__(self, launcher: Launcher, data: Path) -> None:
        self.launcher, self.data = launcher, data
        self.made: dict[tuple[str, str], Result] = {}

    def run(self, name: str, more: str = GROWS, folder: Path | None = None, **job: Any) -> Result:
        """Run a layout, in the folder of an earlier run if that is named."""
        count, flags = LAYOUTS[name]
        argv = shlex.split(MODEL.replace("{data}", str(self.data)) + flags + more)
        result = self.launcher.run(count, argv, folder, **job)
        assert result.codes == [0] * count, [result.said(rank) for rank in range(count)]
        return result

    def whole(self, name: str, more: str = GROWS) -> Result:
        """Return a run from the first step to the last."""
        if (name, more) not in self.made:
            self.made[name, more] = self.run(name, more)
        return self.made[name, more]

    def stopped(self, name: str, more: str, folder: Path) -> Path:
        """Return a copy of what a run had on disk after step 3."""
        shutil.copytree(self.whole(name, more).folder, folder)
        shutil.rmtree(folder / "saved" / f"step_{STEPS:08d}")
        (folder / "log.jsonl").unlink()
        return folder


@pytest.fixture(scope="module")
def runs(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    prefix = tmp_path_factory.mktemp("documents") / "data"
    rng = np.random.default_rng(0)
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as out:
        for length in rng.integers(3, 50, 400):
            document = np.append(rng.zipf(1.5, length) % 198, 198)  # 199 ids, the last one is eod
            out.add(document.astype(np.uint16))
    return Runs(launcher, prefix)


def check_same(one: Result, other: Result) -> None:
    """Hold two runs to the same bits in log and checkpoints."""
    assert one.losses() == other.losses()
    for step in (3, STEPS):
        check_equal(tensors(one.folder / "saved", step), tensors(other.folder / "saved", step))


@pytest.mark.parametrize(
    "serial, name, more",
    [
        ("one rank", "zb-v", UNTIED),
        pytest.param("one rank", "interleaved", "", marks=LATER),
        pytest.param("one rank", "zb-h1", "", marks=LATER),
        pytest.param("one rank", "1f1b", UNTIED, marks=LATER),
        pytest.param("one rank", "gpipe", "", marks=LATER),
        pytest.param("one rank", "interleaved", UNTIED, marks=LATER),
        pytest.param("one rank", "zb-v", "", marks=LATER),
        pytest.param("one rank", "v-half", "", marks=LATER),
        pytest.param("one rank", "recompute", "", marks=LATER),
        pytest.param("one rank", "uneven", "", marks=LATER),
        pytest.param("one rank", "four", "", marks=LATER),
        pytest.param("one rank", "four in V", UNTIED, marks=LATER),
        pytest.param("tp", "tp, interleaved", "", marks=LATER),
        pytest.param("tp", "tp, interleaved", UNTIED, marks=LATER),
        pytest.param("dp", "dp, zb-v", "", marks=LATER),
        pytest.param("dp", "dp, zb-v", UNTIED, marks=LATER),
        pytest.param("tp", "tp, pp first", "", marks=LATER),
        pytest.param("dp", "dp, pp first", "", marks=LATER),
    ],
)
def test_a_pipeline_changes_no_bit_of_a_run(runs: Runs, serial: str, name: str, more: str) -> None:
    """Masks of real documents, 4 then 8 micro-batches, clipped, evaluated, saved."""
    one, other = runs.whole(serial, more + GROWS), runs.whole(name, more + GROWS)
    losses = [row["loss"] for row in one.rows() if "loss" in row]
    assert len(set(losses)) == STEPS and losses[-1] < losses[0] - 0.1
    samples = [row["consumed_samples"] for row in one.rows() if "loss" in row]
    assert samples == [8, 16, 32, 48, 64, 80]
    found = [row for row in one.rows() if "validation_loss" in row or "test_loss" in row]
    assert [row["iteration"] for row in found] == [3, STEPS, STEPS]
    check_same(one, other)


@pytest.mark.prove
@pytest.mark.parametrize(
    "name, more",
    [
        ("tp", ""),
        ("four", ""),
        ("one rank", ""),
        ("one rank", UNTIED),
        ("four", UNTIED),
        ("four in V", UNTIED),
        ("zb-v", ""),
        ("tp", UNTIED),
        ("tp, interleaved", ""),
        ("dp, zb-v", UNTIED),
        ("tp, pp first", ""),
        ("dp, pp first", UNTIED),
    ],
)
def test_every_layout_loads_every_bit_of_what_a_pipeline_saved(
    runs: Runs, name: str, more: str
) -> None:
    """Weights and the optimizer's state, loaded and saved again by the ranks of another layout."""
    saved = runs.whole("interleaved", more + GROWS).folder / "saved"
    again = runs.run(name, f"{more}{GROWS} --load {saved} --ckpt-step 3", no_step=True)
    assert again.saved() == ["step_00000003"]
    check_equal(tensors(saved, 3), tensors(again.folder / "saved", 3))


@pytest.mark.prove
@pytest.mark.parametrize(
    "first, then, more",
    [
        ("interleaved", "interleaved", ""),
        ("interleaved", "zb-v", ""),
        ("zb-v", "interleaved", UNTIED),
        ("interleaved", "four", ""),
        ("interleaved", "one rank", UNTIED),
        ("one rank", "four in V", ""),
        ("tp, interleaved", "tp", ""),
        ("dp, zb-v", "dp", UNTIED),
        ("dp, zb-v", "dp, zb-v", ""),
        ("tp, pp first", "tp, interleaved", ""),
        ("dp, zb-v", "dp, pp first", ""),
    ],
)
def test_a_resumed_run_goes_on_to_the_bit_in_any_pipeline(
    runs: Runs, tmp_path: Path, first: str, then: str, more: str
) -> None:
    folder = runs.stopped(first, more + GROWS, tmp_path / "resumed")
    resumed = runs.run(then, f"{more}{GROWS} --load {{dir}}/saved", folder)
    uninterrupted = runs.whole(first, more + GROWS)
    assert resumed.losses() == [row for row in uninterrupted.losses() if row[0] > 3]
    last = tensors(uninterrupted.folder / "saved", STEPS)
    check_equal(last, tensors(resumed.folder / "saved", STEPS))


def test_tools_take_a_checkpoint_of_a_pipeline_as_any_other(
    runs: Runs, tmp_path: Path, capsys: Any
) -> None:
    """The same tokens and the same Hugging Face directory, byte for byte."""
    said, made = [], []
    for name in ("one rank", "zb-v"):
        saved = runs.whole(name, UNTIED + GROWS).folder / "saved"
        words = f"--load {saved} --max-new-tokens 20 --num-samples 2 --device cpu --seed 5"
        generate.main([*words.split(), "--prompt", "5 17 3"])
        said.append(capsys.readouterr().out)
        made.append(tmp_path / name)
        checkpoint.main(["convert", "--to-hf", str(made[-1]), "--load", str(saved)])
        capsys.readouterr()
    assert said[0] == said[1] and len(said[0].split()) > 40
    files = sorted(path.name for path in made[0].iterdir())
    assert "model.safetensors" in files and "config.json" in files
    assert files == sorted(path.name for path in made[1].iterdir())
    assert filecmp.cmpfiles(*made, files, shallow=False) == (files, [], [])


MISTAKES = {
    "zb-v with three chunks": (
        2,
        " --pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 3",
        "zb-v needs 2 virtual stages on each rank: --num-virtual-stages-per-pipeline-rank 3",
    ),
    "layers lost": (
        2,
        " --pipeline-model-parallel-layout Et|ttL",
        "--pipeline-model-parallel-layout Et|ttL: the number of t's must be that of the layers, 4",
    ),
    "too few micro-batches": (
        2,
        " --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2",
        "--pipeline-schedule interleaved at --global-batch-size 2 = 1 micro-batches",
    ),
    "a rank with nothing": (4, " --num-layers 1", "pipeline rank 1 would have no layers"),
}


@pytest.mark.parametrize("size, more, says", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence_on_every_rank_before_anything_starts(
    launcher: Launcher, runs: Runs, size: int, more: str, says: str
) -> None:
    argv = (MODEL.replace("{data}", str(runs.data)) + f"{P} {size}" + more).split()
    result = launcher.run(size, argv)
    assert result.codes == [2] * size and max(result.ended) < 10
    for rank in range(size):
        (line,) = result.said(rank).splitlines()
        assert line.startswith("pretrain_llama.py: ") and says in line, line
        assert result.said(rank, "out") == ""
    assert not (result.folder / "saved").exists()
