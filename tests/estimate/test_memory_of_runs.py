# SPDX-License-Identifier: Apache-2.0
"""The dry run's formulas against runs: persistent bytes are equal, and so is a step's peak."""

import pytest
import torch

import pretrain_llama
from estimate import buffers, rank_memory
from tests.model.twin import config_of, micro_batches
from training.faults.monitor import FailureMonitor
from training.run import memory_report

BASE = dict(tp=1, dp=2, sp=False, recompute=None, tied=True, m=1, rows=12, lr=1e-2)
CASES = {
    "level 0": dict(zero=0),
    "level 1": dict(zero=1, gather=True),
    "level 1, bf16": dict(zero=1, dtype="bfloat16", states=True),
    "level 1, bf16 gradients": dict(zero=1, dtype="bfloat16", main="bf16"),
    "level 2": dict(zero=2),
    "level 2, untied": dict(zero=2, tied=False, bucket=3000),
    "level 2, nothing under backward": dict(zero=2, overlap=False),
    "level 2, three micro-batches": dict(zero=2, m=3),
    "level 2, each of three": dict(zero=2, m=3, each=True, tied=False),
    "level 2, each of three, alone": dict(zero=2, m=3, each=True, overlap=False),
    "level 3": dict(zero=3, gather=True),
    "level 3, untied": dict(zero=3, gather=True, tied=False, dtype="bfloat16", main="bf16"),
    "level 3, waiting": dict(zero=3, m=3),
    "level 3, recomputed": dict(zero=3, gather=True, recompute="full", m=3),
}
LARGER = {
    "level 2, instances": dict(dp=4, zero=2, instances=2),
    "level 3, dp 4": dict(dp=4, zero=3, gather=True, tied=False),
    "level 2, tp 2 + sp": dict(tp=2, sp=True, zero=2),
    "level 3, tp 2 + sp": dict(tp=2, sp=True, zero=3, gather=True, dtype="bfloat16"),
    "level 3, pp 2": dict(pp=2, zero=3, m=3, layers=8, gather=True),
    "level 2, pp 2, head deferred": dict(pp=2, zero=2, tied=False, layers=8, defer=True),
    "level 1, zb-v": dict(pp=2, zero=1, m=3, layers=8, schedule="zb-v", v=2),
}


def measured(comm, case: dict) -> tuple[dict[str, int], dict[str, int]]:
    """Run three steps on one rank; return what it measures, what is worked out, of each kind."""
    config = config_of(case)
    grid = comm.grid(case["tp"], pp=case.get("pp", 1), instances=case.get("instances", 1))
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    for step in range(3):  # the first learns in which order blocks are used
        pretrain_llama.train_step(run, micro_batches(case, grid.dp.rank, step), 1e-2)
    found = run.optimizer.memory()
    found |= memory_report.transient(run.sink)
    flats = rank_memory.flats(config, pretrain_llama.model_provider, grid.pp.rank)
    said = rank_memory.state(config, flats)
    said |= buffers.transient(config, pretrain_llama.model_provider, grid.pp.rank)
    assert [f.length for f in flats] == [bucket.length for bucket in run.sink.buckets]
    assert said.pop("tied look-ups") >= 0  # not measured
    return found, said


def hold(world, size: int, case: dict) -> None:
    for found, said in world(size).run(measured, BASE | {"dtype": "float32"} | case):
        assert found == said
        assert found["parameters"] and found["gradients"] and found["moments"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_formula_is_what_a_rank_holds(world, case):
    hold(world, 2, case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if "sp" in name else pytest.mark.prove)
        for name, case in LARGER.items()
    ],
    ids=LARGER,
)
def test_the_formula_holds_with_other_axes(world, case):
    hold(world, 4, case)
