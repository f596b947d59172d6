# SPDX-License-Identifier: Apache-2.0
"""Attention within documents and windows, without a mask.

FlashAttention's operator takes the documents' cumulative lengths and the window. Other kernels
(attention/backends.py) run block after block (attention/blocks.py): on a CPU csrc/attention.h, else
torch's operator; on CUDA cuDNN's or flash's operators, or matrix products. Where blocks share
queries, their results are merged by log-sum-exp, and the backward of each block takes the merged
output and log-sum-exp:

    lse = log(exp(lse_1) + exp(lse_2))    out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

Together these are the backward of the whole (Dao et al. 2022, appendix B). An attention sink is
merged in the same way, as a block of one key. All kernels except matrix products require equal head
sizes, so the smaller heads of q and k, or of v, are zero-padded, block by block; the tensors saved
for backward are not padded.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu import torch_private
from mpu.layers.attention.backends import Kernel, card_of, kernel_of
from mpu.layers.attention.blocks import Block, Part, blocks
from mpu.layers.attention.max_logits import Noted, note_maxima
from mpu.layers.fused import attention_is_fast, call
from mpu.layers.packed_seq_params import PackedSeqParams


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSeqParams | None,
    window: int,
    kernel: Kernel | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v: q [b, a, s, d], k [b, g, S, d], v [b, g, S, e] ->
    [b, a, s, e].

    The queries are the last s of the S tokens of a row. packed: the documents in the row (b is then
    1); None: each row is one document. window, sink: see `CoreAttention`. kernel: None: chosen as
    for "auto". Raises ValueError if the documents do not fill the row.
    """
    if kernel is None:
        widest = max(q.shape[3], v.shape[3])
        kernel = kernel_of("auto", card_of(q.device), q.dtype, widest, "documents")
    s, keys = q.shape[2], k.shape[2]
    documents = (keys,) if packed is None else packed.lengths
    if packed is not None and sum(documents) != keys:
        cut = "" if sum(documents) % keys else "; under context parallelism a --model-file must "
        raise ValueError(
            f"the packed documents have {sum(documents)} tokens, but the batch has {keys}"
            f"{cut and cut + 'use core_attention_of(ctx) instead of core_attention'}"
        )
    rows = packed is None and not window and s == keys
    e, one_call = v.shape[3], sink is None  # torch's backward has no gradient of a log-sum-exp
    if one_call and kernel in ("cudnn", "flash") and rows and torch_private.has_attention(kernel):
        return _first(_attention_of_rows(*_of_one_size(q, k, v), kernel), e)
    if one_call and kernel == "flash" and torch_private.operator(torch_private.VARLEN) is not None:
        return _first(_flash_attention(*_of_one_size(q, k, v), packed, window), e)
    todo = blocks(range(keys - s, keys), documents, window)
    return _BlockAttention.apply(q, k, v, todo, kernel, sink)


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams | None, window: int
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d]
    ends, longest = None, (q.shape[1], k.shape[1])
    if packed is not None:
        q, k, v = q[0], k[0], v[0]  # [s, n, d]
        ends, longest = packed.cu_seqlens, (packed.max_seqlen, packed.max_seqlen)
    out = torch_private.flash_attention_of_lengths(q, k, v, ends, longest, window)
    return (out if packed is None else out[None]).transpose(1, 2)


def _attention_of_rows(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """Attend causally to whole rows; out has the layout of q. Backward is torch's own."""
    if kernel == "flash":
        return torch_private.flash_attention(q, k, v, True)[0]
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return torch_private.cudnn_attention(q, k, v, True, learns)[0]


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        saved_ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        todo: tuple[Block, ...],
        kernel: Kernel,
        sink: Tensor | None = None,
    ) -> Tensor:
        before = k.shape[2] - q.shape[2]
        out, lse = outputs(q, v, _sums(q, todo) if sink is None else accumulate_dtype(q))
        attend(todo, q, k, v, out, lse, kernel=kernel, before=before)
        if sink is not None:
            merge_sink(out, lse, sink)
        out = out.to(q.dtype)
        saved_ctx.todo, saved_ctx.before, saved_ctx.kernel = todo, before, kernel
        saved_ctx.save_for_backward(q, k, v, out, lse, sink)
        return out

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sink = saved_ctx.saved_tensors
        q, k, v, out, lse = saved
        kind = _sums(q, saved_ctx.todo)
        sums = tuple(torch.zeros_like(x, dtype=kind) for x in (q, k, v))
        kernel, before = saved_ctx.kernel, saved_ctx.before
        attend_backward(saved_ctx.todo, dy, saved, sums, kernel, before=before)
        dq, dk, dv = (x.to(q.dtype) for x in sums)
        return dq, dk, dv, None, None, sink_gradient(dy, out, lse, sink)


def outputs(q: Tensor, v: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return uninitialised tensors for the output [b, a, s, e], of dtype `kind`, and the
    log-sum-exp [b, a, s] of q [b, a, s, d] and v [b, g, S, e].
    """
    b, a, s, _ = q.shape
    lse = q.new_empty((b, s, a), dtype=accumulate_dtype(q))
    out = q.new_empty((b, s, a, v.shape[3]), dtype=kind)
    return out.transpose(1, 2), lse.transpose(1, 2)


def merge_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Merge a sink [a] into the output and the log-sum-exp of all blocks, in place: it acts as one
    more key, with a value of 0.
    """
    both = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    out.mul_((lse - both).exp_()[..., None])
    lse.copy_(both)


def sink_gradient(dy: Tensor, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor | None:
    """Return the gradient of a sink [a] from the merged out and lse; None if there is no sink.

    With p = exp(sink - lse), its share of the softmax, and a value of 0, it is -sum p (dy out).
    """
    if sink is None:
        return None
    wide = lse.dtype
    pull = (dy.to(wide) * out.to(wide)).sum(-1)  # [b, a, s]
    share = (sink.to(wide)[:, None] - lse).exp_()
    return (share * pull).sum((0, 2)).neg_().to(sink.dtype)


def _empty(x: Tensor, kind: torch.dtype) -> Tensor:
    b, n, s, d = x.shape
    return x.new_empty((b, s, n, d), dtype=kind).transpose(1, 2)


def attend(
    todo: Sequence[Block],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    kernel: Kernel,
    before: int = 0,
    noted: Noted | None = None,
) -> None:
    """Run the forward of blocks: write out and lse, or merge into their values.

    q [b, a, s, d], k [b, g, S, d], v [b, g, S, e]. A block's ranges index dim 2; `before` is
    subtracted from those of queries. A "tril" is a query's first block, so it overwrites. noted:
    see max_logits.py.
    """
    if noted is not None:
        note_maxima(noted, q, k, todo, before)
    for block in todo:
        at, keys = _slice(block.q, before), _slice(block.kv)
        y, new = _forward(kernel, block.part, q[:, :, at], k[:, :, keys], v[:, :, keys])
        if block.part == "tril":
            out[:, :, at], lse[:, :, at] = y, new
        else:  # these queries already have results of other keys
            both = torch.logaddexp(lse[:, :, at], new)
            out[:, :, at].mul_((lse[:, :, at] - both).exp_()[..., None])
            out[:, :, at].addcmul_(y, (new - both).exp_()[..., None])
            lse[:, :, at] = both
        del y, new  # before the next block's


def attend_backward(
    todo: Sequence[Block],
    dy: Tensor,
    saved: tuple[Tensor, ...],
    sums: tuple[Tensor, ...],
    kernel: Kernel,
    *,
    before: int = 0,
) -> None:
    """Run the backward of blocks: add to sums: dq, dk and dv. saved: see block_gradients."""
    dq, dk, dv = sums
    for keys, *parts in block_gradients(todo, dy, saved, dq, kernel, before=before):
        dk[:, :, keys] += parts[0]
        dv[:, :, keys] += parts[1]
        del parts  # before the next block's


def block_gradients(
    todo: Sequence[Block],
    dy: Tensor,
    saved: tuple[Tensor, ...],
    dq: Tensor,
    kernel: Kernel,
    *,
    before: int = 0,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Run the backward of blocks: add to dq, and yield each block's slice of keys, dk and dv.

    saved: q, k, v, and the output and log-sum-exp over all blocks of the queries, not only these.
    """
    q, k, v, out, lse = saved
    for block in todo:
        at, keys = _slice(block.q, before), _slice(block.kv)
        places = ((dy, at), (q, at), (k, keys), (v, keys), (out, at), (lse, at))
        part, dk, dv = _backward(kernel, block.part, *(x[:, :, place] for x, place in places))
        dq[:, :, at] += part
        del part
        yield keys, dk, dv
        del dk, dv  # before the next block's


def accumulate_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype in which the results of several blocks are added."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _sums(q: Tensor, todo: tuple[Block, ...]) -> torch.dtype:
    """Return the dtype of sums over blocks: q's own if each token is in one block only."""
    return q.dtype if all(block.part == "tril" for block in todo) else accumulate_dtype(q)


def _slice(positions: range, before: int = 0) -> slice:
    return slice(positions.start - before, positions.stop - before)


def _forward(kernel: Kernel, part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp [b, a, s] of one block."""
    if part == "triu":  # causal if both are reversed
        out, lse = _forward(kernel, "tril", q.flip(2), k.flip(2), v.flip(2))
        return out.flip(2), lse.flip(2)
    causal = part == "tril"
    way = _way(kernel, k)
    if _takes_one_size(way) and q.shape[3] != v.shape[3] and not q.is_meta:  # a plan has no padding
        out, lse = _forward(kernel, part, *_of_one_size(q, k, v))
        return _first(out, v.shape[3]), lse
    if way == "cpu" and _native_takes(q, k, v):
        return _native_forward(q, k, v, causal)
    if torch_private.has_attention(way):
        if way == "cudnn":
            out, lse = torch_private.cudnn_attention(q, k, v, causal)
            return out, lse.squeeze(3)
        attend = torch_private.flash_attention if way == "flash" else torch_private.cpu_attention
        return attend(q, k, v, causal)
    return products_forward(q, k, v, causal)


def _of_one_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with equal head sizes: the smaller heads are zero-padded.

    The first elements of the output are those for v. If q and k are padded, q is scaled, since the
    kernel divides by the root of the new size. On a CPU keys and values get equal strides, as
    csrc/attention.h requires.
    """
    (d, e), size = (q.shape[3], v.shape[3]), max(q.shape[3], v.shape[3])
    if d < size:
        q, k = F.pad(q * (size / d) ** 0.5, (0, size - d)), F.pad(k, (0, size - d))
    if e < size:
        v = F.pad(v, (0, size - e))
    if d != e and v.device.type == "cpu":
        k, v = k.contiguous(), v.contiguous()
    return q, k, v


def _first(x: Tensor, size: int) -> Tensor:
    """Return the first `size` elements of heads [..., n]."""
    return x if x.shape[-1] == size else x[..., :size]


def _takes_one_size(way: Kernel) -> bool:
    """Return whether a block's kernel requires equal head sizes: all do, except matrix products."""
    return torch_private.has_attention(way)


def _way(kernel: Kernel, k: Tensor) -> Kernel:
    """Return which kernel computes a block: cuDNN's does not support a single key."""
    return "flash" if kernel == "cudnn" and k.shape[2] == 1 else kernel


def _backward(
    kernel: Kernel,
    part: Part,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's parts of dq, dk and dv; out and lse are those over all blocks."""
    if part == "triu":
        flipped = (x.flip(2) for x in (dy, q, k, v, out, lse))
        dq, dk, dv = _backward(kernel, "tril", *flipped)
        return dq.flip(2), dk.flip(2), dv.flip(2)
    causal = part == "tril"
    way, (d, e) = _way(kernel, k), (q.shape[3], v.shape[3])
    if d != e and _takes_one_size(way):
        size = max(d, e)
        dy, out = (F.pad(x, (0, size - e)) for x in (dy, out))
        dq, dk, dv = _backward(kernel, part, dy, *_of_one_size(q, k, v), out, lse)
        dq = _first(dq, d) if d == size else _first(dq, d) * (size / d) ** 0.5
        return dq, _first(dk, d), _first(dv, e)
    if way == "cpu" and _native_takes(q, k, v):
        return _native_backward(dy, q, k, v, out, lse, causal=causal)
    if torch_private.has_attention(way):
        return torch_private.attention_backward(way, dy, (q, k, v, out, lse), causal)
    return products_backward(dy, q, k, v, out, lse, causal=causal)


def _native_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether csrc/attention.h supports a block, is fast, and has work for all threads."""
    alike = q.stride(3) == k.stride(3) == 1 and k.stride() == v.stride()
    alike = alike and k.shape == v.shape and q.shape[3] == k.shape[3]
    alike = alike and q.dtype == k.dtype == v.dtype
    return alike and attention_is_fast(q, k.shape[0] * k.shape[1])


def _native_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute `_forward` by csrc/attention.h."""
    out, lse = outputs(q, v, q.dtype)
    call("block_forward", q.dtype, q, k, v, out, lse, *_native_sizes(q, k, out, lse, out, causal))
    return out, lse


def _native_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_backward` by csrc/attention.h."""
    dy = dy if dy.stride(3) == 1 else dy.contiguous()
    dq, dk, dv = (_empty(x, x.dtype) for x in (q, k, v))
    sizes = _native_sizes(q, k, out, lse, dy, causal)
    call("block_backward", q.dtype, q, k, v, out, lse, dy, dq, dk, dv, *sizes)
    return dq, dk, dv


def _native_sizes(
    q: Tensor, k: Tensor, out: Tensor, lse: Tensor, dy: Tensor, causal: bool
) -> list[int | float]:
    """Return the sizes b, s, S, a, g, d of a block, whether it is causal, its scale and strides."""
    (b, a, s, d), (_, g, keys, _) = q.shape, k.shape
    strides = (n for x in (q, k, out, lse, dy) for n in x.stride()[:3])
    return [b, s, keys, a, g, d, int(causal), d**-0.5, *strides]


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT).to(accumulate_dtype(q))
    scores *= q.shape[3] ** -0.5  # [b, a, s, S]
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def products_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute `_forward` by matrix products, with s x S scores in memory for each head."""
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(q.dtype)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse


def products_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_backward` by matrix products."""
    # p = exp(scores - lse):  dv = p^T dy;  ds = p (dy v^T - sum(dy out));  dq = ds k;  dk = ds^T q
    each = q.shape[1] // k.shape[1]  # query heads of a group
    weights = (_scores(q, k, causal) - lse[..., None]).exp()
    pulls = (dy @ v.repeat_interleave(each, 1).mT).to(weights.dtype)
    pulls -= (dy.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
    pulls = (pulls * weights).mul_(q.shape[3] ** -0.5).to(q.dtype)
    dq = pulls @ k.repeat_interleave(each, 1)
    dk, dv = pulls.mT @ q, weights.to(dy.dtype).mT @ dy  # [b, a, S, d]
    return dq, dk.unflatten(1, (-1, each)).sum(2), dv.unflatten(1, (-1, each)).sum(2)
