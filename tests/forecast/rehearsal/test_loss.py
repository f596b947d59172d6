# SPDX-License-Identifier: Apache-2.0
"""What the head and the loss launch and move on a GPU."""

import pytest

pytest.importorskip("triton", reason="this platform has no triton")

TOKENS, V = 64, 1024  # of one micro-batch of a small model; the vocabulary is padded


def of_loss(report):
    """Return the launches and the bytes of the loss in a step."""
    rows = [row for row in report["launches"] if row["part"] == "loss"]
    return sum(row["count"] for row in rows), sum(row["bytes"] for row in rows)


@pytest.mark.prove
@pytest.mark.parametrize("world, flags", [
        (1, ""),
        (2, "--tensor-model-parallel-size 2"),
    ])
def test_three_passes_over_the_logits(rehearse, world, flags):
    """One to read them, one to read them and write their gradient over them; never in fp32."""
    found = rehearse(flags, world)
    assert found.code == 0, found.text
    launches, moved = of_loss(found.report)
    logits = TOKENS * V // world * 2
    assert launches <= 20 and 3 * logits * 0.98 < moved < 3 * logits * 1.1


LONG = "--fused-linear-cross-entropy --seq-length 8192 --max-position-embeddings 8192"
KEPT = ("parameters", "gradients", "masters", "moments")


@pytest.mark.prove
def test_in_chunks_memory_is_flat_and_launches_are_few(rehearse):
    """From 32k to 256k tokens: 2 and 16 chunks; the head's weight and its gradient are kept."""
    found = [rehearse(f"{LONG} --vocab-size {1 << bits}") for bits in (15, 18)]
    assert [each.code for each in found] == [0, 0], found[0].text + found[1].text
    launches, comes = [], []
    for each in found:
        rows = each.report["launches"]
        launches.append(sum(row["count"] for row in rows if row["part"] in ("loss", "linear")))
        kinds = each.report["memory"]["by_kind"].items()
        comes.append(sum(nbytes for kind, nbytes in kinds if kind not in KEPT))
    assert comes[0] <= comes[1] <= 1.02 * comes[0]
    assert comes[0] > 2 * 8192 * 16384, "a chunk's logits are not at the fullest moment"
    assert launches[1] - launches[0] <= 8 * 14
