# SPDX-License-Identifier: Apache-2.0
"""Core attention: causal, grouped-query (Ainslie et al. 2023), on the heads of one rank.

attention/backends.py chooses the kernel that computes it. On a CPU with AVX-512 it is
csrc/attention.h; on CUDA, where the flag leaves it open, torch's scaled_dot_product_attention
chooses. Documents, windows, and a requested kernel, go to block_attention.py. There is no
mask.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.layers.attention.backends import Card, Kernel, Work, card_of, kernel_of
from mpu.layers.attention.block_attention import block_attention
from mpu.layers.attention.max_logits import HeadMaxima, note_rows
from mpu.layers.fused import apply_rope, attention_is_fast, call
from mpu.layers.packed_seq_params import PackedSeqParams


class CoreAttention:
    """A layer's core attention. Subclasses attend in another way: by `attend` alone.

    requested: --attention-backend. card: what the choice of a kernel depends on, found once; None:
    it is read from torch at each call. maxima: where the largest logits are noted, if they are.
    """

    maxima: HeadMaxima | None = None  # also of a fork's subclass that does not call __init__

    def __init__(
        self, requested: str = "auto", card: Card | None = None, maxima: HeadMaxima | None = None
    ) -> None:
        self.requested, self.card, self.maxima = requested, card, maxima

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        groups: int,
        packed: PackedSeqParams | None,
        *,
        cache: list[Tensor] | None = None,
        window: int = 0,
        rotary: int = 0,
    ) -> Tensor:
        """Rotate q and k, then attend: qkv [s, b, (heads + 2 groups) d] -> [s, b, heads d].

        qkv may be overwritten (`apply_rope`). heads, groups: those of this rank. packed: the
        documents, which a query does not look out of; None: each row is one. cache: when text is
        generated, the keys and values of the S - s tokens before these, to which this adds theirs.
        window: a query looks at itself and the window - 1 tokens before it; 0: at all before it.
        rotary: the elements of a head that are rotated; 0: all. Raises ValueError where the
        requested kernel cannot do it.
        """
        q, k, v = apply_rope(qkv, cos, sin, heads, groups, rotary)  # each [s, b, n, d]
        if self.maxima is not None and torch.is_grad_enabled():  # once, also where recomputed
            self.note(self.maxima, q, k, packed, window)
        return self.attend(q, k, v, packed, cache, window)

    def note(
        self,
        maxima: HeadMaxima,
        q: Tensor,
        k: Tensor,
        packed: PackedSeqParams | None,
        window: int,
    ) -> None:
        """Note the largest logits of q [s, b, a, d] and k [s, b, g, d], those of all tokens."""
        if packed is not None:
            q, k = one_row(q), one_row(k)
        q, k = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3)  # each [b, n, s, d]
        note_rows(maxima.of(q.shape[1]), q, k, packed, window)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: PackedSeqParams | None,
        cache: list[Tensor] | None,
        window: int,
    ) -> Tensor:
        """q [s, b, a, d], k and v [s, b, g, d] -> [s, b, a d]."""
        if packed is None and cache is None and not window:
            return self.attend_rows(q, k, v)
        s, b = q.shape[:2]
        if packed is not None:
            q, k, v = (one_row(x) for x in (q, k, v))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # each [b, n, s, d]
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)  # [b, g, S, d]
            cache[:] = [k, v]
        kernel = self.kernel(q, "documents" if cache is None else "cache")
        square = q.shape[2] == k.shape[2]
        plain = packed is None and not window and (square or s == 1)
        if plain and kernel != "flash" and self.requested not in ("unfused", "local"):
            y = dot_product_attention(q, k, v, causal=square, alike=kernel == "efficient")
        else:
            y = block_attention(q, k, v, packed, window, kernel).permute(2, 0, 1, 3).flatten(2)
        return y if packed is None else y.view(b, s, -1).transpose(0, 1)

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to whole rows: q [s, b, a, d], k and v [s, b, g, d] -> [s, b, a d]."""
        kernel = self.kernel(q, "rows")
        if kernel == "cpu" and takes_native(q, k, v):
            return CausalAttention.apply(q, k, v)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # each [b, n, s, d]
        if kernel == "cpu" or self.requested == "auto":  # torch chooses
            return dot_product_attention(q, k, v, alike=kernel == "efficient")
        return block_attention(q, k, v, None, 0, kernel).permute(2, 0, 1, 3).flatten(2)

    def kernel(self, q: Tensor, work: Work) -> Kernel:
        """Return which kernel does some work on queries [..., d]."""
        card = card_of(q.device) if self.card is None else self.card
        return kernel_of(self.requested, card, q.dtype, q.shape[-1], work)


core_attention = CoreAttention()  # for a layer that takes no flag


def one_row(x: Tensor) -> Tensor:
    """Return rows [s, b, n, d] one after another, as a batch of one [b s, 1, n, d].

    At b > 1 that is a copy, once for each of q, k and v, as that of y and of dy is: rows of
    [s, b, ...] lie interleaved, and varlen operators find a token by one stride (docs/fused.md).
    """
    s, b = x.shape[:2]
    return x.transpose(0, 1).reshape(b * s, 1, -1, x.shape[3])


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, alike: bool = False
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v: q [b, a, s, d], k and v [b, g, S, d] -> [s, b, a d].

    causal: whether a query looks at earlier keys only; then s must be S. torch chooses the kernel.
    alike: repeat k and v for each head of q. torch's memory-efficient kernel takes no fewer of them
    before pytorch/pytorch#191085, and torch then multiplies s x s scores for each head.
    """
    if alike and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.permute(2, 0, 1, 3).flatten(2)


def takes_native(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether csrc/attention.h takes these, fast, and has work for all threads."""
    alike = q.stride() == k.stride() == v.stride()  # slices of one tensor
    alike = alike and k.shape == v.shape and q.dtype == k.dtype == v.dtype
    contiguous = q.stride()[2:] == (q.shape[3], 1) and (len(q), q.shape[3]) == (len(k), k.shape[3])
    return alike and contiguous and attention_is_fast(q, q.shape[1] * k.shape[2])


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
