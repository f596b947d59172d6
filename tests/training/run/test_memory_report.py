# SPDX-License-Identifier: Apache-2.0
"""A run's memory report: what is counted on its own buckets, after its second step."""

import re

import pytest
import torch

import pretrain_llama
from tests.forecast.recorded import memory, recorded
from tests.model.twin import config_of, micro_batches
from training.faults.monitor import FailureMonitor
from training.run import memory_report
from training.run.start import describe
from training.settings.update_rules import optimizer_groups

BASE = dict(tp=1, dp=2, sp=False, recompute=None, tied=True, m=1, rows=12, lr=1e-2)
KINDS = ("parameters", "gradients", "masters", "moments")


def told(line: str) -> dict[str, int]:
    """Return the bytes of a report's line, by kind."""
    _, _, sizes = line.partition(" in bytes: ")
    found = re.findall(r"([a-z ]+?) ([\d,]+)(?:, |$)", sizes)
    return {kind: int(size.replace(",", "")) for kind, size in found}


def reported(comm, case: dict) -> tuple[list[str], dict[str, int]]:
    """Train two steps; return what is noted before the first of them and after the second, and the
    bytes of a recording.
    """
    config = config_of(case)
    grid = comm.grid(case["tp"], pp=case.get("pp", 1))
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    noted: list[str] = []
    describe(run, pretrain_llama.model_provider, noted.append)
    for step in range(2):
        pretrain_llama.train_step(run, micro_batches(case, grid.dp.rank, step), 1e-2)
    return [noted[1], memory_report.report(run.optimizer)], memory(recorded(config, grid))


@pytest.mark.parametrize(
    "case, buckets, peaks",
    [
        (dict(zero=0), "has its weights in 13 buckets of about 500 elements (--ddp-", 0),
        (dict(zero=1, bucket=None), "its weights in 1 bucket of about 2,097,152", 0),
        (dict(zero=2, bucket=3000), "buckets of about 3,000 elements", 1),
        (dict(zero=3, gather=True), "its weights in 5 buckets: one per transformer block", 2),
    ],
    ids=["level 0", "level 1, automatic", "level 2", "level 3"],
)
def test_two_steps_are_what_was_recorded(world, case, buckets, peaks):
    for rank, (lines, said) in enumerate(
        world(2).run(reported, BASE | {"dtype": "bfloat16"} | case)
    ):
        assert buckets in lines[0]
        assert lines[1].startswith(f"memory of rank {rank} in bytes: parameters ")
        found = {kind.removesuffix(" at most"): n for kind, n in told(lines[1]).items()}
        assert list(found) == [*KINDS, *("unsharded gradients", "gathered weights")[:peaks]]
        assert found == {kind: size for kind, size in said.items() if size}
    assert ("the default" in lines[0]) == ("bucket" in case and case["bucket"] is None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_masters_in_host_memory_are_apart_from_the_weights(dtype):
    config = config_of(BASE | dict(dp=1, dtype=dtype))
    grid = pretrain_llama.make_grid(config, pretrain_llama.Launch())
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    groups = optimizer_groups(config)
    optimizer = pretrain_llama.Optimizer(run.model, run.sink, grid, groups, cpu_offload=True)
    found = told(memory_report.report(optimizer))
    assert list(found) == [*KINDS]
    assert found["moments"] == 2 * found["masters"]
    elements = sum(bucket.length for bucket in run.sink.buckets)
    assert found["masters"] == elements * (8 if dtype == "float64" else 4)
