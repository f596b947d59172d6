# SPDX-License-Identifier: Apache-2.0
"""What stands in for csrc counts the FLOPs of attention as its callers say its sizes."""

import torch

from forecast.rehearsal.host import flops
from mpu.layers.attention import block_attention


def test_blocks_of_attention_count_the_products_that_they_compute(monkeypatch):
    """Two products forward and five backward, of 2 n m d FLOPs a head; a causal square half."""
    found = list[float]()
    monkeypatch.setattr(
        block_attention, "call", lambda name, dtype, *args: found.append(flops(name, args))
    )
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 12, 16)
    for keys, causal in ((k, False), (k[:, :, :8], True)):
        out, lse = block_attention._native_forward(q, keys, keys, causal)
        block_attention._native_backward(out, q, keys, keys, out, lse, causal=causal)
    whole, square = 2 * 2 * 4 * 8 * 12 * 16, 2 * 2 * 4 * 8 * 8 * 16
    assert found == [2 * whole, 5 * whole, square, 2.5 * square]
    assert flops("swiglu_forward", (q, k)) == 0
