# SPDX-License-Identifier: Apache-2.0
"""What a step allocates on top, as recorded: whole gradients, gathered weights, worked out by hand.

The small Llama has the blocks of test_buckets.py. Over 4 ranks its buckets of
30,000 elements have 40, 32, 32, 36 blocks untied, and 32, 32, 32, 20 tied; at level 3 (head and
norm, layers, embedding) they have 20, 32, 32, 32, 20.
"""

from collections import Counter

import pytest

import pretrain_llama
from forecast.recording import ACTIVATIONS, GATHERED, UNSHARDED, record
from forecast.traffic import rows
from mpu.pipeline.schedules import Action
from tests.sampling import sampled
from tests.training.small_llama import read

K = 1024
UNTIED = "--untie-embeddings-and-output-weights"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
ENDS = "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-model-parallel-layout Ett|ttL"
CUT = "--ddp-bucket-size 30000"
OVERLAP = "--overlap-grad-reduce"
EACH = "--zero-reduce-each-microbatch"
AHEAD = "--overlap-param-gather"
TWO = "--global-batch-size 16"  # two micro-batches on each of 4 ranks

# flags, ranks, pipeline rank; blocks of gradients and of weights
MOMENTS = [
    (UNTIED, 4, 0, (0, 0)),
    ("", 4, 0, (0, 0)),
    (f"--zero-stage 1 {UNTIED} {CUT} {TWO}", 4, 0, (0, 0)),
    (f"--zero-stage 2 {UNTIED} {CUT}", 4, 0, (140, 0)),  # all leave at the end
    (f"--zero-stage 2 {UNTIED} {CUT} {OVERLAP}", 4, 0, (40 + 32, 0)),
    (f"--zero-stage 2 {UNTIED} {CUT} {OVERLAP} {TWO}", 4, 0, (140, 0)),
    # the embedding's is still being sent when the next micro-batch has the head's
    (f"--zero-stage 2 {UNTIED} {CUT} {OVERLAP} {TWO} {EACH}", 4, 0, (40 + 36, 0)),
    (f"--zero-stage 2 {UNTIED} {CUT} {TWO} {EACH}", 4, 0, (40, 0)),
    (f"--zero-stage 3 {UNTIED} {AHEAD}", 1, 0, (0, 0)),  # no one to share with
    (f"--zero-stage 2 {UNTIED} {OVERLAP}", 4, 0, (136, 0)),  # one bucket in all
    # tied: the bucket of the embedding is whole from the head's gradient to the look-ups'
    (f"--zero-stage 2 {CUT} {OVERLAP}", 4, 0, (20 + 32 + 32, 0)),
    (f"--zero-stage 3 {UNTIED} {AHEAD} {OVERLAP}", 4, 0, (64, 64)),
    (f"--zero-stage 3 {UNTIED} {OVERLAP}", 4, 0, (64, 32)),
    (f"--zero-stage 3 {UNTIED} {AHEAD}", 4, 0, (136, 64)),
    # norms apart, 8 blocks, and the embedding, 10, and two layers
    (f"--zero-stage 3 {SP} {AHEAD} {OVERLAP}", 4, 0, (8 + 10 + 32, 32)),
    # a pipeline keeps its weights: layers and last norm of rank 1, not the head, whole anyway
    (f"--zero-stage 3 {ENDS} {AHEAD} {OVERLAP}", 4, 1, (20 + 64, 2 + 64)),
]


def recorded(more, world=4, rank=0):
    return record(read(more, world), pretrain_llama, [rank])[rank]


@pytest.mark.parametrize(
    "more,world,rank,sizes", sampled(MOMENTS, 3), ids=[m[0] or "tied" for m in MOMENTS]
)
def test_the_fullest_moment(more, world, rank, sizes):
    found = recorded(more, world, rank)
    assert (found.most(UNSHARDED), found.most(GATHERED)) == tuple(4 * K * n for n in sizes)


def test_the_fullest_moment_in_bf16():
    more = f"--bf16 --main-grads-dtype bf16 --zero-stage 3 {AHEAD} {OVERLAP}"
    found = recorded(more)  # norm 4 (of 1, for 4 ranks), layers 32 each, embedding 20; tied
    assert (found.most(UNSHARDED), found.most(GATHERED)) == ((20 + 64) * K * 2, 64 * K * 2)


def made(more, nbytes):
    """Return in which actions of a step memory of so many bytes comes, that stays after them."""
    found, action = [], ""
    recording = recorded(more, 1)
    for event in recording.recorder.events:
        if isinstance(event, tuple) and not isinstance(event, Action):
            storage, sign = event
            if sign > 0 and storage.nbytes == nbytes and storage.kind == ACTIVATIONS:
                found.append(action)
        else:
            action = event
    return found


def test_the_gradient_of_tied_look_ups_waits_for_the_next_micro_batch():
    """The embedding's backward makes it once, when the head's is over: 19,456 elements in fp32."""
    size, two = 4 * 19456, "--micro-batch-size 4 --global-batch-size 8"
    assert made("--micro-batch-size 4", size) == [Action("B", 0, 0)]
    assert made(two, size) == [Action("B", 0, 0)]
    assert made(f"{two} {UNTIED}", size) == []


@pytest.mark.parametrize(
    "more,order",
    sampled([
        (UNTIED, [4, 3, 2, 1, 0, 1, 2, 3]),
        ("", [4, 3, 2, 1, 0, 4, 0, 1, 2, 3]),  # the head's weight is the embedding's
        (f"{UNTIED} --recompute-granularity full", [4, 3, 2, 1, 0, 1, 2, 3]),
        (
            f"{UNTIED} --recompute-granularity full --recompute-num-layers 3",
            [4, 3, 2, 1, 0, 3, 2, 1, 2, 3],
        ),
        (
            f"{UNTIED} --recompute-granularity full --recompute-num-layers 2",
            [4, 3, 2, 1, 0, 1, 3, 2, 3],
        ),
    ], 3),
)  # fmt: skip
def test_the_order_of_uses(more, order):
    """Each is gathered as it is used, where nothing is gathered ahead."""
    transfers = recorded(f"--zero-stage 3 {more}").recorder.transfers
    gathered = [each.who for each in transfers if each.purpose == "gather"]
    assert gathered == [f"bucket {n}" for n in order]


def gathers(more, rank=0):
    """Return how often a step gathers how many elements in fp32."""
    found = Counter[int]()
    for row in rows(recorded(more, 4, rank)):
        found[row.bytes // 4] += row.times * (row.purpose == "gather")
    return +found


@pytest.mark.parametrize(
    "more,layers,ends",
    sampled([
        ("", 6, 2),
        (TWO, 12, 4),
        # the layers next to the turns, last to first and first to next step's, are still there
        (AHEAD, 5, 2),
        (f"{AHEAD} {TWO}", 9, 4),
        ("--recompute-granularity full --recompute-num-layers 3", 8, 2),
    ], 3),
)  # fmt: skip
def test_gathers_of_a_step(more, layers, ends):
    assert gathers(f"--zero-stage 3 {UNTIED} {more}") == {32 * K: layers, 20 * K: ends}


def test_a_pipeline_gathers_once_a_step():
    assert gathers(f"--zero-stage 3 {ENDS} --global-batch-size 16", 1) == {2 * K: 1, 32 * K: 2}
