# SPDX-License-Identifier: Apache-2.0
"""Whole runs with frozen parameters: saved, resumed on another layout, and with other subsets."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cached_runs import CachedRuns
from tests.launcher import Launcher, Result
from tests.saved import tensors

STEPS, AT = 4, 2
FORKS = {
    "embedding alone": r"^(?!embedding)",
    "head alone": r"^(?!head)",
    "every second layer": r"layers\.[02]\.|^embedding|^norm|^head",
}
LAYOUTS = {
    "one": (1, ""),
    "tp 2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "ZeRO 3": (2, "--zero-stage 3 --overlap-param-gather"),
}
MODEL = f"""
    --model-file tests/model/frozen_fork.py --mock-data --vocab-size 203 --num-layers 4
    --hidden-size 32 --num-attention-heads 4 --seq-length 24 --num-workers 0 --device cpu
    --train-iters {STEPS} --lr 1e-2 --clip-grad 0.5 --weight-decay 0.1 --global-batch-size 8
    --micro-batch-size 2 --eval-interval 2 --eval-iters 1 --log-interval 1 --log-params-norm
    --untie-embeddings-and-output-weights --save-interval {AT} --save {{dir}}/saved
"""
KINDS = ("exp_avg", "exp_avg_sq", "master")


class Runs(CachedRuns):
    """Runs of MODEL, of a subset on a layout."""

    def run(self, fork: str, layout: str, more: str = "--fp64", load: Path | None = None) -> Result:
        ranks, flags = LAYOUTS[layout]
        return self.once(ranks, f"{MODEL} {flags} {more} --frozen {FORKS[fork]}", load)


@pytest.fixture(scope="module")
def runs(launcher: Launcher) -> Runs:
    return Runs(launcher, AT)


def rows(result: Result, after: int = 0) -> list[dict[str, Any]]:
    keys = ("iteration", "loss", "grad_norm", "params_norm", "validation_loss")
    return [{k: row.get(k) for k in keys} for row in result.rows() if row["iteration"] > after]


def check_rows(here: list[dict[str, Any]], there: list[dict[str, Any]], rel: float) -> None:
    assert len(here) == len(there) > 0
    for mine, theirs in zip(here, there, strict=True):
        for key, value in mine.items():
            same = value == theirs[key] if not rel or value is None else None
            assert same or value == pytest.approx(theirs[key], rel=rel), (key, mine, theirs)


def check_resume(runs: Any, name: str, layout: str) -> Result:
    """Resume a run in its own layout: the rest has the bits of the run. Return the resumed one."""
    here = runs.run(name, layout)
    resumed: Result = runs.run(name, layout, load=here.folder / "saved")
    check_rows(rows(resumed, AT), rows(here, AT), 0)
    last, again = (tensors(run.folder / "saved", STEPS) for run in (here, resumed))
    assert all(torch.equal(again[name], last[name]) for name in last)
    return resumed


def check_resumes_of_all(runs: Any, name: str) -> None:
    """Resume the run of each layout in every layout: the rest is that of one rank."""
    for written in LAYOUTS:
        saved = runs.run(name, written).folder / "saved"
        for layout in LAYOUTS:
            resumed = runs.run(name, layout, load=saved)
            check_rows(rows(resumed, AT), rows(runs.run(name, "one"), AT), 1e-10)


@pytest.mark.prove
@pytest.mark.parametrize("layout", ["ZeRO 3", "pp 2", "tp 2"])
@pytest.mark.parametrize("fork", sorted(FORKS))
def test_a_fork_trains_its_part_and_resumes(runs: Runs, fork: str, layout: str) -> None:
    """As on one rank; a resume on the same layout has the same bits."""
    one, here = runs.run(fork, "one"), runs.run(fork, layout)
    check_rows(rows(here), rows(one), 1e-10)
    manifest = json.loads((here.folder / "saved/step_00000004/manifest.json").read_text())
    assert manifest["version"] == 2
    first, last = (tensors(here.folder / "saved", step) for step in (AT, STEPS))
    kept = {name.rpartition(".")[0] for name in last if name.rpartition(".")[2] in KINDS}
    weights = {name for name in last if name.rpartition(".")[2] not in KINDS}
    moved = {name for name in weights if not torch.equal(first[name], last[name])}
    assert kept == moved, "state is kept of what trains"
    assert 0 < len(moved) < len(weights)
    for name in weights:
        assert torch.allclose(last[name], tensors(one.folder / "saved", STEPS)[name], atol=1e-9)
    check_resume(runs, fork, layout)


@pytest.mark.prove
@pytest.mark.parametrize("fork", sorted(FORKS))
def test_any_layout_resumes_any_other(runs: Runs, fork: str) -> None:
    check_resumes_of_all(runs, fork)


@pytest.mark.parametrize("layout", ["E||tt|ttL", "E|t||tttL"])
def test_stages_without_a_parameter_are_passed(launcher: Launcher, layout: str) -> None:
    """Backward ends at the first stage that trains; an empty stage may come before it."""
    cut = f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {layout}"
    words = MODEL.replace("--save-interval 2 --save {dir}/saved", "") + "--fp64 --frozen ^embedding"
    one, two = launcher.run(1, words.split()), launcher.run(2, f"{words} {cut}".split())
    assert two.codes == [0, 0], two.said(0)
    check_rows(rows(two), rows(one), 1e-10)


def test_another_subset_is_refused(runs: Runs, launcher: Launcher) -> None:
    saved = runs.run("head alone", "ZeRO 3").folder / "saved"
    flags = MODEL.replace("{dir}/saved", "{dir}/more").split() + ["--fp64", "--load", str(saved)]
    other = ["--frozen", FORKS["embedding alone"]]
    ended = launcher.run(1, [*flags, *other])
    assert ended.codes == [2]
    line = ended.said(0).splitlines()[-1]
    assert "head.weight is frozen in this run, not in the checkpoint (1 more differ)" in line
    assert "--no-load-optim" in line and "--finetune" in line
    ended = launcher.run(1, flags)  # nothing is frozen
    assert ended.codes == [2] and "is frozen in the checkpoint, not in this run" in ended.said(0)
    ended = launcher.run(1, [*flags, *other, "--no-load-optim", "--train-iters", "6"])
    assert ended.codes == [0], ended.said(0)
    assert "head.weight is frozen in this run, not in the checkpoint" in ended.said(0, "out")
    assert {row["iteration"] for row in ended.rows()} == {5, 6}


MORE = {
    "Muon": "--optimizer muon --fp64",
    "float8, delayed": "--bf16 --fp8-format hybrid --fp8-recipe delayed",
    "float8, rowwise": "--bf16 --fp8-format e4m3 --fp8-recipe rowwise --zero-stage 1",
    "float8 at ZeRO 3": "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --zero-stage 3",
    "replicas": "--check-replicas 1 --on-replica-mismatch stop --log-digests 1",
    "layers": "--log-layer-rms-interval 1",
    "offload": "--bf16 --optimizer-state-offload --zero-stage 2",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "fused loss": "--fused-linear-cross-entropy --defer-embedding-wgrad-compute "
    "--pipeline-model-parallel-size 2",
}


@pytest.mark.prove
@pytest.mark.parametrize("fork, name", [*zip(itertools.cycle(sorted(FORKS)), sorted(MORE))])
def test_with_other_mechanisms(launcher: Launcher, fork: str, name: str) -> None:
    words = f"{MODEL} {MORE[name]} --frozen {FORKS[fork]}"
    ended = launcher.run(2, words.split())
    assert ended.codes == [0, 0], ended.said(0)
    first, last = (tensors(ended.folder / "saved", step) for step in (AT, STEPS))
    same = {n for n in last if n in first and torch.equal(first[n], last[n])}
    moved = {n for n in last.keys() - same if not n.endswith("amax_history")}
    trained = {"embedding alone": "embed_tokens", "head alone": "lm_head"}.get(fork, "layers.")
    assert moved and all(trained in name for name in moved), moved
