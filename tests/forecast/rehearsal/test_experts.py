# SPDX-License-Identifier: Apache-2.0
"""A rehearsed mixture of experts has no finding, and the dry run's memory.

At balance, and at a stated skew. test_drawn_layouts.py draws more.
"""

import pytest

from tests.forecast.rehearsal.conftest import stated
from training.flags.parse import parse

MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --num-layers 4 --hidden-size 2048
    --num-attention-heads 16 --group-query-attention --num-query-groups 4 --ffn-hidden-size 3584
    --seq-length 2048 --max-position-embeddings 2048 --lr 1e-3 --train-iters 8 --bf16
    --num-experts 8 --expert-tensor-parallel-size 1
""".split()
TP, EP = "--tensor-model-parallel-size 2 --sequence-parallel", "--expert-model-parallel-size"
PP, TO = "--pipeline-model-parallel-size 2", "--moe-token-dispatcher-type"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
SHARED = "--moe-shared-expert-intermediate-size 1024 --moe-router-score-function sigmoid"
FEW = [  # world, rank, flags
    (4, 0, f"{EP} 4 {TO} alltoall --zero-stage 1 {OVERLAP} --moe-router-topk 2"),
    (8, 5, f"{TP} {EP} 2 {TO} allgather --zero-stage 3 {OVERLAP} --recompute-granularity full"),
    (
        8,
        6,
        f"{PP} {TP} {EP} 4 {TO} alltoall --pipeline-schedule zb-h1 {SHARED} --zero-stage 2 "
        "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3 --output-z-loss-coeff 1e-4 "
        "--eod-mask-loss",
    ),
]

def held(rehearse, world, rank, flags, within=0.02):
    """Rehearse a layout; hold its findings and its memory."""
    words = " ".join([*MODEL, flags])
    code, report, text = rehearse(f"{words} --rehearse-rank {rank}", world, False)
    assert (code, report.get("findings")) == (0, []), (world, rank, flags, text[-2000:])
    config = parse([*words.split(), "--dry-run"], world)
    told, counted = stated(config, rank), report["memory"]["peak_bytes"]
    assert abs(sum(told.values()) - counted) <= within * counted, (
        world, rank, flags, told, sum(told.values()), counted, report["memory"]["by_kind"],
    )  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("world, rank, flags", FEW)
def test_a_layout_has_no_finding_and_the_dry_runs_memory(rehearse, world, rank, flags):
    words = f"{flags} --micro-batch-size 1 --global-batch-size 8"
    held(rehearse, world, rank, words)


@pytest.mark.prove
def test_the_fullest_rank_has_the_dry_runs_memory_at_a_skew(rehearse):
    words = f"{EP} 4 {TO} alltoall --micro-batch-size 2 --global-batch-size 16 --zero-stage 1"
    held(rehearse, 4, 0, f"{words} --rehearse-expert-skew 2.5")


@pytest.mark.prove
def test_counts_of_many_experts_that_the_host_alone_reads_are_no_finding(rehearse):
    """128 experts and 4 layers: the numbers that the log reads are more than 4 KiB."""
    small = " ".join(MODEL).replace("--num-experts 8", "--num-experts 128")
    small = small.replace("2048", "128").replace("32000", "512").replace("3584", "64")
    words = f"{small} --moe-layer-freq [0,0,0,1] --moe-router-topk 2 --num-attention-heads 4"
    code, report, _ = rehearse(f"{words} --micro-batch-size 1 --global-batch-size 1", 1, False)
    assert (code, report["findings"]) == (0, []) and report["time"]["step_seconds"] > 0


TURNS = f"{TO} alltoall --overlap-moe-expert-parallel-comm --micro-batch-size 2"
VIRTUAL = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
BESIDE = [  # world, rank, flags: a forward beside a backward
    (4, 0, f"{EP} 4 --zero-stage 1 {OVERLAP} --moe-router-topk 2 --global-batch-size 32"),
    (8, 6, f"{TP} {EP} 4 {SHARED} --recompute-granularity full --global-batch-size 32"),
    (8, 1, f"{VIRTUAL} {EP} 4 --zero-stage 2 --global-batch-size 64"),
    (8, 5, f"{VIRTUAL} {EP} 2 {SHARED} --zero-stage 3 {OVERLAP} --global-batch-size 64"),
    (8, 2, f"{PP} {EP} 2 --recompute-granularity selective --global-batch-size 64"),
    (8, 7, f"{PP} {EP} 4 --moe-layer-freq [0,1,1,1] --global-batch-size 64"),
]


@pytest.mark.prove
@pytest.mark.parametrize("world, rank, flags", BESIDE)
def test_a_forward_beside_a_backward_has_no_finding_and_the_dry_runs_memory(
    rehearse, world, rank, flags
):
    held(rehearse, world, rank, f"{flags} {TURNS}")
