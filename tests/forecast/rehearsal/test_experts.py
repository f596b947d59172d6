# SPDX-License-Identifier: Apache-2.0
"""A rehearsed mixture of experts has no finding, and the dry run's memory.

At balance, and at a stated skew.
"""

import random

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
CHOICES = [  # each flag's values
    ["", "", TP, "--tensor-model-parallel-size 4 --sequence-parallel"],
    ["", "", "--context-parallel-size 2", "--context-parallel-size 2 --cp-comm-type all_gather"],
    ["", "", PP, PP + " --pipeline-schedule zb-h1", PP + " --pipeline-schedule zb-v",
     PP + " --num-virtual-stages-per-pipeline-rank 2"],
    [f"{EP} {n}" for n in (2, 2, 4, 4, 8)] + [""],
    [f"{TO} {kind}" for kind in ("allgather", "alltoall", "auto")],
    ["--moe-router-topk 1 --moe-router-pre-softmax", "--moe-router-topk 2", "--moe-router-topk 4"],
    ["", "", "--moe-layer-freq 2", "--moe-layer-freq [0,1,1,1]", "--moe-layer-freq [1,0,0,1]"],
    ["", "", SHARED, "--qk-layernorm --moe-ffn-hidden-size 768"],
    ["", "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
     "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
     "--moe-z-loss-coeff 0.001"],
    ["", "--zero-stage 1", "--zero-stage 2", "--zero-stage 3"],
    ["", OVERLAP, "--overlap-grad-reduce"],
    ["", "", "--recompute-granularity selective", "--recompute-granularity full",
     "--recompute-granularity full --recompute-method block --recompute-num-layers 1"],
    ["", "--untie-embeddings-and-output-weights"],
    ["", "", "--main-grads-dtype bf16", "--grad-reduce-in-bf16"],
    ["", "", "--fused-linear-cross-entropy"],
    ["", "", "--reset-position-ids --reset-attention-mask --eod-mask-loss"],
    ["--micro-batch-size 1", "--micro-batch-size 2"],
    ["--global-batch-size 8", "--global-batch-size 16"],
]  # fmt: skip


def drawn(seed, count):
    """Return so many layouts: world, a rank, flags. Some are refused."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        flags = [chance.choice(values) for values in CHOICES]
        parts = 1
        for flag in flags[:3]:
            words = flag.split()
            parts *= int(words[1]) if words else 1
        ep = int(flags[3].split()[1]) if flags[3] else 1
        pp = 2 if "pipeline-model" in flags[2] else 1
        world = parts * chance.choice([1, 2, 4])
        world = world if world // pp % ep == 0 else pp * max(ep, parts // pp)
        found.append((world, chance.randrange(world), " ".join(flags)))
    return found


def held(rehearse, world, rank, flags, within=0.02):
    """Rehearse a layout; hold its findings and its memory. Return whether it was accepted."""
    words = " ".join([*MODEL, flags])
    code, report, text = rehearse(f"{words} --rehearse-rank {rank}", world, False)
    if code == 2:
        assert "pretrain_llama.py --rehearse: " in text, text
        return False
    assert (report["findings"], code) == ([], 0), (world, rank, flags, report["findings"])
    config = parse([*words.split(), "--dry-run"], world)
    told, counted = stated(config, rank), report["memory"]["peak_bytes"]
    assert abs(sum(told.values()) - counted) <= within * counted, (
        world, rank, flags, told, sum(told.values()), counted, report["memory"]["by_kind"],
    )  # fmt: skip
    return True


@pytest.mark.prove
@pytest.mark.parametrize("world, rank, flags", FEW)
def test_a_layout_has_no_finding_and_the_dry_runs_memory(rehearse, world, rank, flags):
    words = f"{flags} --micro-batch-size 1 --global-batch-size 8"
    assert held(rehearse, world, rank, words)


@pytest.mark.prove
def test_the_fullest_rank_has_the_dry_runs_memory_at_a_skew(rehearse):
    words = f"{EP} 4 {TO} alltoall --micro-batch-size 2 --global-batch-size 16 --zero-stage 1"
    assert held(rehearse, 4, 0, f"{words} --rehearse-expert-skew 2.5")


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
    assert held(rehearse, world, rank, f"{flags} {TURNS}")


@pytest.mark.prove
@pytest.mark.parametrize("part", range(4))
def test_drawn_layouts_have_no_finding_and_the_dry_runs_memory(rehearse, part):
    accepted = [held(rehearse, *one) for one in drawn(361, 48)[part::4]]
    assert sum(accepted) >= 5, accepted
