# SPDX-License-Identifier: Apache-2.0
"""Core attention: causal, grouped-query (Ainslie et al. 2023), on the heads of one rank.

attention/backends.py chooses the kernel. On a CPU with AVX-512 it is csrc/attention.h; on CUDA, if
the flag is auto, torch's scaled_dot_product_attention chooses. Documents, windows, a requested
kernel, values whose head size differs from the keys', and attention sinks are handled by
block_attention.py. No mask is used.
"""

import math
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
    """A layer's core attention: a call takes q, k and v before RoPE, fused, as `qkv_linear` returns
    them; `attend` takes them separately, and v may have its own head size, as in latent attention.

    After RoPE both are the same. Subclasses change how attention is computed by overriding
    `compute` and `note`.

    requested: --attention-backend. card: the device properties for the choice of a kernel, read
    once; None: they are read from torch at each call. maxima: records the largest logits, if set.
    """

    maxima: HeadMaxima | None = None  # default for a fork's subclass that does not call __init__

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
        documents; a query attends only within its own; None: each row is one document. cache: for
        text generation, the keys and values of the S - s earlier tokens; those of the s new tokens
        are appended. window: a query attends to itself and the window - 1 tokens before it; 0: to
        all tokens before it. rotary: the number of elements of a head that are rotated; 0: all.
        Raises ValueError if the requested kernel does not support it.
        """
        q, k, v = apply_rope(qkv, cos, sin, heads, groups, rotary)  # each [s, b, n, d]
        return self.attend(q, k, v, packed, cache, window)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: PackedSeqParams | None = None,
        cache: list[Tensor] | None = None,
        window: int = 0,
        *,
        scale: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Return softmax(scale q k^T) v; the heads of v may have their own size.

        q [s, b, a, d], k [s, b, g, d], v [s, b, g, e], those of this rank, rotated by the caller ->
        [s, b, a e]. packed, cache, window: see `__call__`. scale: above 0; None: 1 / sqrt(d).
        sink: a logit of each of this rank's query heads, [a], that takes part in the softmax and
        has a value of 0 (Xiao et al. 2023; gpt-oss): y = sum_j exp(x_j) v_j / (exp(sink) +
        sum_j exp(x_j)). Raises ValueError if sizes, window, scale or sink are invalid, or if the
        requested kernel does not support them.
        """
        check_attention(q, k, v, window, scale, sink)
        if scale is not None:  # applied to the queries, so that kernels need not support it
            q = q * (scale * q.shape[3] ** 0.5)
        if self.maxima is not None and torch.is_grad_enabled():  # once, also if recomputed
            self.note(self.maxima, q, k, packed, window)
        return self.compute(q, k, v, packed, cache, window=window, sink=sink)

    def note(
        self,
        maxima: HeadMaxima,
        q: Tensor,
        k: Tensor,
        packed: PackedSeqParams | None,
        window: int,
    ) -> None:
        """Record the largest logits of q [s, b, a, d] and k [s, b, g, d] of all tokens."""
        if packed is not None:
            q, k = one_row(q), one_row(k)
        q, k = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3)  # each [b, n, s, d]
        note_rows(maxima.of(q.shape[1]), q, k, packed, window)

    def compute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: PackedSeqParams | None,
        cache: list[Tensor] | None,
        window: int,
        sink: Tensor | None,
    ) -> Tensor:
        """Compute `attend` with a scale of 1 / sqrt(d), without its checks."""
        whole = packed is None and not window  # rows of one document
        if whole and cache is None and sink is None:
            return self.compute_rows(q, k, v)
        s, b = q.shape[:2]
        if packed is not None:
            q, k, v = (one_row(x) for x in (q, k, v))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # each [b, n, s, d]
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)  # [b, g, S, d]
            cache[:] = [k, v]
        work: Work = "cache" if cache is not None else "blocks" if whole else "documents"
        kernel = self.kernel(q, v, work)
        square, alike = q.shape[2] == k.shape[2], k.shape[3] == v.shape[3]
        plain = whole and sink is None and (s == 1 or square and (alike or kernel == "efficient"))
        if plain and kernel != "flash" and self.requested not in ("unfused", "local"):
            y = dot_product_attention(q, k, v, causal=square, alike=kernel == "efficient")
        else:
            y = block_attention(q, k, v, packed, window, kernel=kernel, sink=sink)
            y = y.permute(2, 0, 1, 3).flatten(2)
        return y if packed is None else y.view(b, s, -1).transpose(0, 1)

    def compute_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to whole rows: q [s, b, a, d], k [s, b, g, d], v [s, b, g, e] -> [s, b, a e]."""
        kernel = self.kernel(q, v, "rows")
        if kernel == "cpu" and takes_native(q, k, v):
            return CausalAttention.apply(q, k, v)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # each [b, n, s, d]
        alike = k.shape[3] == v.shape[3]  # most of torch's kernels require it
        torch_chooses = kernel == "cpu" or self.requested == "auto"
        if kernel == "efficient" or (alike and torch_chooses):
            return dot_product_attention(q, k, v, alike=kernel == "efficient")
        return block_attention(q, k, v, None, 0, kernel).permute(2, 0, 1, 3).flatten(2)

    def kernel(self, q: Tensor, v: Tensor, work: Work) -> Kernel:
        """Return the kernel for a kind of work on queries [..., d] and values [..., e]."""
        card = card_of(q.device) if self.card is None else self.card
        return kernel_of(self.requested, card, q.dtype, max(q.shape[-1], v.shape[-1]), work)


core_attention = CoreAttention()  # for a layer without the flag


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None, sink: Tensor | None
) -> None:
    """Raise ValueError if the arguments of `CoreAttention.attend` are invalid."""
    shapes = [list(x.shape) for x in (q, k, v)]
    if {len(shape) for shape in shapes} != {4}:
        raise ValueError(f"attend: q, k and v must be [s, b, heads, size], not {shapes}")
    (s, b, a, d), (keys, rows, g, of_keys), of_values = shapes
    if (s, b, d) != (keys, rows, of_keys) or [keys, rows, g] != of_values[:3]:
        raise ValueError(
            f"attend: q {shapes[0]}, k {shapes[1]} and v {shapes[2]} must have the same tokens and "
            "rows, q and k the same head size, and k and v the same heads"
        )
    if not g or a % g:
        raise ValueError(f"attend: {a} query heads must be a multiple of {g} key/value heads")
    if type(window) is not int or window < 0:
        raise ValueError(f"attend: window is {window!r}: it must be a whole number, 0 for none")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"attend: scale is {scale!r}: it must be a finite number above 0")
    if sink is not None and list(sink.shape) != [a]:
        raise ValueError(
            f"attend: sink is {list(sink.shape)}: it must be [{a}], a logit for each of the rank's "
            f"{a} query heads"
        )


def one_row(x: Tensor) -> Tensor:
    """Return rows [s, b, n, d] one after another, as a batch of one [b s, 1, n, d].

    At b > 1 each of q, k and v is copied for this, as y and dy are: the rows of [s, b, ...] are
    interleaved in memory, and varlen operators use one stride per token (docs/kernels.md).
    """
    s, b = x.shape[:2]
    return x.transpose(0, 1).reshape(b * s, 1, -1, x.shape[3])


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, alike: bool = False
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v: q [b, a, s, d], v [b, g, S, e] -> [s, b, a e].

    causal: whether a query attends only to itself and earlier keys; s must then be S. torch chooses
    the kernel. alike: repeat k and v for each head of q. Before pytorch/pytorch#191085 torch's
    memory-efficient kernel does not support fewer heads of k and v, and torch falls back to
    materialising s x s scores for each head.
    """
    if alike and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.permute(2, 0, 1, 3).flatten(2)


def takes_native(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether csrc/attention.h supports these, is fast, and has work for all threads."""
    alike = k.shape == v.shape and q.dtype == k.dtype == v.dtype
    alike = alike and (len(q), q.shape[3]) == (len(k), k.shape[3])
    slices = _strides(q)[:2] == _strides(k)[:2] == _strides(v)[:2]  # of one tensor
    dense = all(_strides(x)[2:] in ([q.shape[3], 1], [-1, 1], [-1, -1]) for x in (q, k, v))
    return alike and slices and dense and attention_is_fast(q, q.shape[1] * k.shape[2])


def _strides(x: Tensor) -> list[int]:
    """Return a tensor's strides, with -1 for a dimension of one element, whose stride is moot."""
    return [-1 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)]


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
