# SPDX-License-Identifier: Apache-2.0
"""Core attention: causal, grouped-query (Ainslie et al. 2023), on the heads of one rank.

On a CPU with AVX-512 it calls csrc/attention.h, elsewhere torch's scaled_dot_product_attention
(flash kernels); documents and windows go to block_attention.py. There is no mask.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.layers.attention.block_attention import block_attention
from mpu.layers.fused import apply_rope, attention_is_fast, call
from mpu.layers.packed_seq_params import PackedSeqParams


def core_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    groups: int,
    packed: PackedSeqParams | None,
    *,
    cache: list[Tensor] | None = None,
    window: int = 0,
) -> Tensor:
    """Rotate q and k, then attend: qkv [s, b, (heads + 2 groups) d] -> [s, b, heads d].

    qkv may be overwritten (`apply_rope`). heads, groups: those of this rank. packed: the documents,
    which a query does not look out of; None: each row is one. cache: when text is generated, the
    keys and values of the S - s tokens before these, to which this adds theirs. window: a query
    looks at itself and the window - 1 tokens before it; 0: at all before it.
    """
    s, b, _ = qkv.shape
    q, k, v = apply_rope(qkv, cos, sin, heads, groups)  # each [s, b, n, d]
    if packed is None and cache is None and not window and takes_native(q, k, v):
        return CausalAttention.apply(q, k, v)
    if packed is not None:  # rows one after another, as a batch of one
        q, k, v = (x.transpose(0, 1).reshape(b * s, 1, -1, x.shape[3]) for x in (q, k, v))
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # each [b, n, s, d]
    if cache is not None:
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)  # [b, g, S, d]
        cache[:] = [k, v]
    square = q.shape[2] == k.shape[2]
    if packed is None and not window and (square or s == 1):
        y = dot_product_attention(q, k, v, causal=square)
    else:
        y = block_attention(q, k, v, packed, window).permute(2, 0, 1, 3).flatten(2)
    return y if packed is None else y.view(b, s, -1).transpose(0, 1)


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v: q [b, a, s, d], k and v [b, g, S, d] -> [s, b, a d].

    causal: whether a query looks at earlier keys only; then s must be S.
    """
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.permute(2, 0, 1, 3).flatten(2)


def takes_native(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether csrc/attention.h takes these, fast, and has work for all threads."""
    alike = q.stride() == k.stride() == v.stride()  # slices of one tensor
    alike = alike and k.shape == v.shape and q.dtype == k.dtype == v.dtype
    whole = q.stride()[2:] == (q.shape[3], 1) and (len(q), q.shape[3]) == (len(k), k.shape[3])
    return alike and whole and attention_is_fast(q, q.shape[1] * k.shape[2])


class CausalAttention(torch.autograd.Function):
    """csrc/attention.h: q [s, b, a, d], k and v [s, b, g, d] -> [s, b, a d]."""

    @staticmethod
    def forward(saved_ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (s, b, a, d), g, sums = q.shape, k.shape[2], torch.promote_types(q.dtype, torch.float32)
        saved_ctx.sizes = (s, b, a, g, d, *q.stride()[:2], d**-0.5)
        y, lse = q.new_empty(s, b, a * d), q.new_empty((b, a, s), dtype=sums)
        call("attention_forward", q.dtype, q, k, v, y, lse, *saved_ctx.sizes)
        saved_ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        (q, k, v, y, lse), sizes = saved_ctx.saved_tensors, saved_ctx.sizes
        s, b, a, g, d = sizes[:5]
        dqkv = q.new_empty(s, b, a + 2 * g, d)
        given = (q, k, v, y, lse, dy.contiguous(), dqkv, *sizes)
        call("attention_backward", q.dtype, *given)
        return dqkv.split((a, g, g), 2)
