# SPDX-License-Identifier: Apache-2.0
"""A run's memory report: what was measured, beside what the formulas state."""

from dataclasses import replace

import pytest
import torch

import pretrain_llama
from estimate import buffers, rank_memory
from pretrain_llama import model_provider
from tests.model.twin import config_of, micro_batches
from tests.training.small_llama import read
from training.faults.monitor import FailureMonitor
from training.run import memory_report
from training.run.start import describe
from training.update_rules import optimizer_groups

BASE = dict(tp=1, dp=2, sp=False, recompute=None, tied=True, m=1, rows=12, lr=1e-2)
KINDS = ("parameters", "gradients", "masters", "moments")
FORK = "the formula is for the model as built on meta tensors"


def said(config, measured: dict, peaks: dict, pp_rank: int = 0) -> dict[str, str]:
    """Return what a line says of a kind, by its first words."""
    every = memory_report.lines(config, model_provider, measured, peaks, pp_rank)
    return {line[:25].rstrip(): line[25:].lstrip() for line in every}


def test_a_line_a_kind():
    config = read("--zero-stage 2 --bf16 --overlap-grad-reduce", 4)
    kept = rank_memory.state(config, rank_memory.flats(config, model_provider))
    gradients = buffers.transient(config, model_provider)["whole gradients"]
    peaks = {"whole gradients": gradients, "gathered weights": 0}
    found = said(config, kept, peaks)
    assert list(found) == [*KINDS, "whole gradients, at most"]
    assert found["parameters"] == f"{116 * 1024 * 2:,} bytes, equal to the formula"
    assert all(text.endswith(" bytes, equal to the formula") for text in found.values())
    more = kept | {"parameters": kept["parameters"] + 4096, "moments": kept["moments"] - 8}
    found = said(config, more, peaks | {"whole gradients": gradients // 2})
    number = f"{116 * 1024 * 2:,}"
    assert found["parameters"] == f"241,664 bytes, 4,096 more than the formula's {number}: {FORK}"
    assert "bytes, 8 fewer than the formula's" in found["moments"] and FORK in found["moments"]
    assert "for the second step on, with the most" in found["whole gradients, at most"]
    assert found["gradients"].endswith("equal to the formula")


def test_the_lines_are_of_the_pipeline_rank():
    more = "--pipeline-model-parallel-size 2 --num-layers 4 --zero-stage 3"
    config = read(f"{more} --decoder-last-pipeline-num-layers 1", 4)
    kept = rank_memory.state(config, rank_memory.flats(config, model_provider, 1))
    peaks = buffers.transient(config, model_provider, 1)
    del peaks["tied look-ups"]  # not measured
    assert all("equal" in text for text in said(config, kept, peaks, 1).values())
    assert not all("equal" in text for text in said(config, kept, peaks, 0).values())


def reported(comm, case: dict) -> list[str]:
    """Train two steps and report, after what is noted before the first of them."""
    config = config_of(case)
    grid = comm.grid(case["tp"], pp=case.get("pp", 1))
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    noted: list[str] = []
    describe(run, model_provider, noted.append)
    for step in range(2):
        pretrain_llama.train_step(run, micro_batches(case, grid.dp.rank, step), 1e-2)
    return [noted[1], *memory_report.in_full(config, model_provider, run.optimizer)]


@pytest.mark.parametrize(
    "case, buckets, peaks",
    [
        (dict(zero=0), "has its weights in 13 buckets of about 500 elements (--ddp-", 0),
        (dict(zero=1, bucket=None), "its weights in 1 bucket of about 2,097,152", 0),
        (dict(zero=2, bucket=3000), "buckets of about 3,000 elements", 1),
        (dict(zero=3, gather=True), "its weights in 5 buckets, one transformer block", 2),
    ],
    ids=["level 0", "level 1, automatic", "level 2", "level 3"],
)
def test_two_steps_are_what_the_formulas_state(world, case, buckets, peaks):
    for lines in world(2).run(reported, BASE | {"dtype": "bfloat16"} | case):
        assert buckets in lines[0]
        assert len(lines) == 1 + len(KINDS) + peaks
        assert all(line.endswith("bytes, equal to the formula") for line in lines[1:])
    assert ("the default" in lines[0]) == ("bucket" in case and case["bucket"] is None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_masters_in_host_memory_are_apart_from_the_weights(dtype):
    config = config_of(BASE | dict(dp=1, dtype=dtype))
    grid = pretrain_llama.make_grid(config, pretrain_llama.Launch())
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    groups = optimizer_groups(config)
    optimizer = pretrain_llama.Optimizer(run.model, run.sink, grid, groups, cpu_offload=True)
    config = replace(config, parallel=replace(config.parallel, optimizer_cpu_offload=True))
    lines = memory_report.in_full(config, model_provider, optimizer)
    assert all("equal to the formula" in line for line in lines), lines
    assert f" {optimizer.memory()['moments'] // 2:,} bytes" in lines[2]


def test_where_all_is_equal_it_is_one_line():
    """Else every kind has its own."""
    sizes = {"parameters": 610304, "masters": 0, "gathered weights, at most": 8}
    kinds = [f"{k:<25} {size:>15,} bytes, equal to the formula" for k, size in sizes.items()]
    (line,) = memory_report.brief(kinds, 3)
    said = "memory of rank 3 in bytes, as --dry-run computes it: "
    assert line == f"{said}parameters 610,304, gathered weights, at most 8"
    differs = [*kinds, "moments 3 bytes, 1 more than the formula's 2: why"]
    assert memory_report.brief(differs, 0) == differs
