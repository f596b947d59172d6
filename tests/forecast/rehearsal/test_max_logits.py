# SPDX-License-Identifier: Apache-2.0
"""What the largest attention logits add to a step on a GPU."""

from collections import Counter

import pytest

pytest.importorskip("triton", reason="this platform has no triton")

S, HEADS, D, LAYERS = 2048, 4, 16, 1
LONG = f"--seq-length {S} --max-position-embeddings {S} --num-layers {LAYERS}"
FLAG, CLIP = "--log-max-attention-logit", "--qk-clip"


def added(rehearse, world, flags, flag):
    """Return what a flag adds to a step, by operation: launches and FLOPs."""
    counts, flops = [], []
    for words in (f"{LONG} {flags}", f"{LONG} {flags} {flag}"):
        found = rehearse(words, world)
        assert found.code == 0, found.text
        counts.append(Counter())
        flops.append(Counter())
        for row in found.report["launches"]:
            if row["phase"] != "update":
                counts[-1][row["op"]] += row["count"]
                flops[-1][row["op"]] += row["flops"]
    return counts[1] - counts[0], flops[1] - flops[0]


CASES = [  # ranks, flags, launches of the kernel a layer and micro-batch
    (1, "--global-batch-size 2", FLAG, 1),
    (1, "--global-batch-size 2 --recompute-granularity full", CLIP, 1),
    # of the queries of two pieces: a triangle each, and the keys before; then the other rank's
    (2, "--global-batch-size 2 --context-parallel-size 2", FLAG, 4),
]


@pytest.mark.prove
@pytest.mark.parametrize("world, flags, flag, launches", CASES)
def test_a_launch_a_block_of_attention(rehearse, world, flags, flag, launches):
    """And no logits in memory: half the FLOPs of attention's forward, in 16-bit numbers.

    In chunks of a CPU's cache it is 4 for a layer of these sizes, of 8 launches each.
    """
    counts, flops = added(rehearse, world, flags, flag)
    kernel = counts.pop("triton::max_logits_kernel")
    assert kernel == launches * 2 * LAYERS
    assert sum(counts.values()) <= 12, counts  # the maxima of a step, once
    pairs = HEADS * S * (S + 1) // 2 if world == 1 else 0
    found = flops["triton::max_logits_kernel"] / (2 * LAYERS)
    if pairs:
        assert found == 2 * D * pairs and set(+flops) == {"triton::max_logits_kernel"}
    else:  # of a rank with half of the queries, one end and the other
        assert 0.98 < found / (D * HEADS * S * S / 2) < 1.02


@pytest.mark.prove
def test_documents_are_one_launch_too(rehearse):
    words = "--global-batch-size 2 --reset-attention-mask --reset-position-ids"
    counts, _ = added(rehearse, 1, words, FLAG)
    assert counts.pop("triton::max_logits_kernel") == 2 * LAYERS


@pytest.mark.prove
def test_its_products_are_timed_in_16_bits(rehearse):
    """Its results are in fp32. An H100 reaches 400 to 1,000 TFLOP/s in bf16, and 60 in fp32."""
    words = "--seq-length 8192 --max-position-embeddings 8192 --num-layers 1 --kv-channels 256"
    words += " --global-batch-size 1 --rehearse-device h100"
    (_, plain, _), (_, found, _) = rehearse(words), rehearse(f"{words} {FLAG}")
    flops = sum(row["flops"] for row in found["launches"] if "max_logits" in row["op"])
    seconds = [each["time"]["busy_seconds"]["matmul"] for each in (plain, found)]
    assert flops == HEADS * 8192 * 8193 * 256
    assert flops / 1e15 < seconds[1] - seconds[0] < flops / 4e14
