# SPDX-License-Identifier: Apache-2.0
"""What a step allocates on top: whole gradients and gathered weights, worked out by hand.

The small Llama has the blocks of test_rank_memory.py. Over 4 ranks its buckets of 30,000 elements
have 40, 32, 32, 36 blocks untied, and 32, 32, 32, 20 tied; at level 3 (head and norm, layers,
embedding) they have 20, 32, 32, 32, 20.
"""

from collections import Counter

import pytest

from estimate import activations, buffers, rank_memory
from pretrain_llama import model_provider
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

# flags, ranks, pipeline rank; blocks of gradients and of weights, elements of look-ups
MOMENTS = [
    (UNTIED, 4, 0, (0, 0, 0)),
    ("", 4, 0, (0, 0, 19456)),
    (f"--zero-stage 1 {UNTIED} {CUT} {TWO}", 4, 0, (0, 0, 0)),
    (f"--zero-stage 2 {UNTIED} {CUT}", 4, 0, (140, 0, 0)),  # all leave at the end
    (f"--zero-stage 2 {UNTIED} {CUT} {OVERLAP}", 4, 0, (40 + 32, 0, 0)),
    (f"--zero-stage 2 {UNTIED} {CUT} {OVERLAP} {TWO}", 4, 0, (140, 0, 0)),
    # the embedding's is still being sent when the next micro-batch has the head's
    (f"--zero-stage 2 {UNTIED} {CUT} {OVERLAP} {TWO} {EACH}", 4, 0, (40 + 36, 0, 0)),
    (f"--zero-stage 2 {UNTIED} {CUT} {TWO} {EACH}", 4, 0, (40, 0, 0)),
    (f"--zero-stage 3 {UNTIED} {AHEAD}", 1, 0, (0, 0, 0)),  # no one to share with
    (f"--zero-stage 2 {UNTIED} {OVERLAP}", 4, 0, (136, 0, 0)),  # one bucket in all
    # tied: the bucket of the embedding is whole from the head's gradient to the look-ups'
    (f"--zero-stage 2 {CUT} {OVERLAP}", 4, 0, (20 + 32 + 32, 0, 19456)),
    (f"--zero-stage 3 {UNTIED} {AHEAD} {OVERLAP}", 4, 0, (64, 64, 0)),
    (f"--zero-stage 3 {UNTIED} {OVERLAP}", 4, 0, (64, 32, 0)),
    (f"--zero-stage 3 {UNTIED} {AHEAD}", 4, 0, (136, 64, 0)),
    # norms apart, 8 blocks, and the embedding, 10, and two layers
    (f"--zero-stage 3 {SP} {AHEAD} {OVERLAP}", 4, 0, (8 + 10 + 32, 32, 160 * 64)),
    # a pipeline keeps its weights: layers and last norm of rank 1, not the head, whole anyway
    (f"--zero-stage 3 {ENDS} {AHEAD} {OVERLAP}", 4, 1, (20 + 64, 2 + 64, 0)),
]


@pytest.mark.parametrize("more,world,rank,sizes", MOMENTS, ids=[m[0] or "tied" for m in MOMENTS])
def test_the_fullest_moment(more, world, rank, sizes):
    config = read(more, world)
    found = buffers.transient(config, model_provider, rank)
    assert list(found) == ["whole gradients", "gathered weights", "tied look-ups"]
    gradients, weights, lookups = sizes
    assert list(found.values()) == [4 * K * gradients, 4 * K * weights, 4 * lookups]


def test_the_fullest_moment_in_bf16():
    config = read(f"--bf16 --main-grads-dtype bf16 --zero-stage 3 {AHEAD} {OVERLAP}", 4)
    # norm 4 (of 1, for 4 ranks), layers 32 each, embedding 20; tied
    assert buffers.transient(config, model_provider) == {
        "whole gradients": (20 + 64) * K * 2,
        "gathered weights": 64 * K * 2,
        "tied look-ups": 19456 * 2,
    }


@pytest.mark.parametrize(
    "more,order",
    [
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
    ],
)
def test_the_order_of_uses(more, order):
    config = read(f"--zero-stage 3 {more}", 4)
    assert buffers.uses(config, model_provider, rank_memory.flats(config, model_provider)) == order


@pytest.mark.parametrize(
    "more,micro_batches,layers,ends",
    [
        ("", 1, 6, 2),
        ("", 2, 12, 4),
        # the layers next to the turns, last to first and first to next step's, are still there
        (AHEAD, 1, 5, 2),
        (AHEAD, 2, 9, 4),
        ("--recompute-granularity full --recompute-num-layers 3", 1, 8, 2),
    ],
)
def test_gathers_of_a_step(more, micro_batches, layers, ends):
    config = read(f"--zero-stage 3 {UNTIED} {more}", 4)
    flats = rank_memory.flats(config, model_provider)
    found = Counter(buffers.gathers(config, model_provider, flats, micro_batches))
    assert found == {32 * K: layers, 20 * K: ends}


def test_a_pipeline_gathers_once_a_step():
    config = read(f"--zero-stage 3 {ENDS} --global-batch-size 16", 4)
    flats = rank_memory.flats(config, model_provider, 1)
    assert buffers.gathers(config, model_provider, flats, 4) == [2 * K, 32 * K, 32 * K]


def test_what_a_pipelines_last_gradients_leave():
    """Weights that no gradient needs any more, and look-ups as the sum of their bucket begins."""
    config = read(f"--zero-stage 3 {ENDS} {UNTIED}", 4)
    flats = rank_memory.flats(config, model_provider, 1)
    names = activations.profile(config, model_provider, 1).gradients
    freed = [now.freed for now, _ in buffers._leaving(config, flats, names, {})]
    assert freed == sorted(freed) and len(set(freed)) > 3
    whole = buffers.transient(config, model_provider, 1)["gathered weights"]
    assert (freed[0], freed[-1]) == (0, whole)

    one = "--zero-stage 1 --overlap-grad-reduce --grad-reduce-in-bf16 --bf16 --device cuda"
    config = read(f"{one} --pipeline-model-parallel-size 2 --pipeline-schedule zb-v", 4)
    flats = rank_memory.flats(config, model_provider)
    names = activations.profile(config, model_provider).gradients
    (embedding,) = buffers.both_ends(config, model_provider)
    moments = buffers._leaving(config, flats, names, {embedding: 7})
    assert {now.lookups for now, _ in moments[:-1]} == {7}
    assert moments[-2][1].lookups == moments[-1][0].lookups == 0 < moments[-2][1].sums
