# SPDX-License-Identifier: Apache-2.0
"""The largest attention logit of each head over the global batch, and QK-clip, which bounds it.

A logit is q k^T / sqrt(d) of a query and a key that it attends to: masked pairs do not count.

    in a step   each forward that has a backward records the maximum of each of its heads
    its end     the maximum over micro-batches and over cp x dp: exact, so in any order
                -> S of each key/value group, the maximum of its query heads
                -> after the update, where S > threshold, with eta = threshold / S:
                   the group's rows of W_q are multiplied by eta^alpha, of W_k by eta^(1 - alpha)

That is the rule of Megatron-LM (megatron/core/optimizer/qk_clip.py) and of MuonClip (Kimi K2
technical report, 2025, section 2.1), in which each head has its own key. The maxima cost one
additional product q k^T per layer; the attention kernels are unchanged. On a GPU it is
mpu/kernels/max_logits.py, which stores no logits; on a CPU, and for tensors that it does not
support, torch multiplies some rows at a time. A step whose update is skipped clips nothing.
Evaluations and measurements are not recorded, and a recomputed forward is recorded once. Nothing
waits for the device.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpu.comm.collectives import MAX, all_reduce
from mpu.comm.transport import Label
from mpu.context import LayerContext
from mpu.gradients import StepState
from mpu.kernels import available
from mpu.layers.attention.backends import HALVES
from mpu.layers.attention.blocks import Block, Part, blocks
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.param import placement_of

LABEL = Label("core_attention", "max logits")
# for torch's operations: the number of logits in memory at once on a CPU, which stay in its cache,
# and their bytes elsewhere: few launches, little memory
CHUNK, CHUNK_BYTES = 1 << 22, 1 << 28
WIDEST = 256  # the largest head size that the kernel supports


class Noted(NamedTuple):
    """The tensor in which maxima of heads are recorded: values [a]. on_gpu: LayerContext's."""

    values: Tensor
    on_gpu: bool = False


class HeadMaxima:
    """The maxima of one layer's heads in this step: [heads of this rank]; None before the first."""

    def __init__(self, ctx: LayerContext) -> None:
        self.ctx = ctx
        self.noted: Tensor | None = None

    def of(self, heads: int, first: int = 0, among: int = 0) -> Noted:
        """Return the slot for the maxima of heads [first, first + heads).

        among: the number of query heads of this rank, if `heads` are not all.
        """
        if self.noted is None:
            kind, device = self.ctx.accumulate, self.ctx.device
            self.noted = torch.full((among or heads,), -torch.inf, dtype=kind, device=device)
        return Noted(self.noted[first : first + heads], self.ctx.on_gpu)


def note_rows(
    noted: Noted, q: Tensor, k: Tensor, packed: PackedSeqParams | None, window: int
) -> None:
    """Update `noted` by each head's largest logit in whole rows: q [b, a, s, d], k [b, g, s, d].

    packed: the documents in the row (b is then 1); None: each row is one document. On a GPU it is
    one launch for all of them.
    """
    with torch.no_grad():
        if by_kernel(noted, q, k):
            ends = None if packed is None else packed.cu_seqlens
            launch(q, k, noted.values, causal=True, window=window, ends=ends)
            return
        documents = (q.shape[2],) if packed is None else packed.lengths
        note_maxima(noted, q, k, blocks(range(q.shape[2]), documents, window))


def note_maxima(
    noted: Noted, q: Tensor, k: Tensor, todo: Sequence[Block], before: int = 0
) -> None:
    """Update `noted` by each head's largest logit in blocks: q [b, a, s, d], k [b, g, S, d].

    before: subtracted from the indices of queries, as in `attend` of block_attention.py. On a GPU
    it is one launch per block.
    """
    values, on_gpu = noted
    with torch.no_grad():
        launches = by_kernel(noted, q, k)
        for block in todo:
            some = q[:, :, block.q.start - before : block.q.stop - before]
            keys, causal = k[:, :, block.kv.start : block.kv.stop], block.part == "tril"
            if launches:  # a "triu" is a window of one token, without a causal limit
                window = 1 if block.part == "triu" else 0
                launch(some, keys, values, causal=causal, window=window)
            else:
                found = largest(some, keys, block.part, values.dtype, on_gpu)
                torch.maximum(values, found, out=values)


def by_kernel(noted: Noted, q: Tensor, k: Tensor) -> bool:
    """Return whether mpu/kernels/max_logits.py supports these: 16-bit tensors on a GPU, in
    attention's layout, and fp32 maxima. Meta tensors of a recorded GPU step assume Triton.
    """
    return (
        noted.on_gpu
        and q.dtype == k.dtype
        and q.dtype in HALVES
        and noted.values.dtype == torch.float32
        and q.shape[3] <= WIDEST
        and q.stride(3) == k.stride(3) == 1
        and min(q.numel(), k.numel()) > 0
        and (q.is_meta or available.launches(q))
    )


def launch(q: Tensor, k: Tensor, noted: Tensor, **how: Any) -> None:
    """Launch the kernel, except on meta tensors: it allocates nothing that a plan must count."""
    if not q.is_meta:
        from mpu.kernels.max_logits import max_logits

        max_logits(q, k, noted, **how)


def largest(
    q: Tensor, k: Tensor, part: Part, kind: torch.dtype, on_gpu: bool = False
) -> Tensor:
    """Return the largest logit of each head in one block, of dtype `kind`: [a]."""
    (b, a, s, d), (g, keys) = q.shape, k.shape[1:3]
    chunk = CHUNK_BYTES // kind.itemsize if on_gpu else CHUNK
    step = max(1, chunk // max(1, b * a * keys))
    found = torch.full((a,), -torch.inf, dtype=kind, device=q.device)
    for first in range(0, s, step):
        last = min(first + step, s)
        low, high = (first if part == "triu" else 0), (last if part == "tril" else keys)
        some = q[:, :, first:last].reshape(b * g, -1, d)  # the heads of a group, one after another
        scores = _products(some, k[:, :, low:high].flatten(0, 1), kind, on_gpu)
        scores = scores.view(b, a, last - first, high - low)
        if part != "all":
            hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device)
            hidden = hidden.triu(first - low + 1) if part == "tril" else hidden.tril(-1)
            scores.masked_fill_(hidden, -torch.inf)
        # NaN counts as infinity: the step is skipped either way
        top = scores.amax((0, 2, 3)).nan_to_num_(torch.inf, torch.inf, -torch.inf)
        found = torch.maximum(found, top)
    return found.mul_(d**-0.5)


def _products(q: Tensor, k: Tensor, kind: torch.dtype, on_gpu: bool) -> Tensor:
    """Return q k^T of [n, s, d] and [n, S, d], summed in `kind`."""
    if on_gpu and q.dtype != kind:
        return torch.bmm(q, k.mT, out_dtype=kind)
    return torch.bmm(q.to(kind), k.to(kind).mT)


class Rows(NamedTuple):
    """A parameter and a factor for each of its rows: [rows]."""

    param: nn.Parameter
    factors: Tensor


class MaxLogits(StepState):
    """The maxima of all layers of a rank, in the order in which the model created them.

    largest: of the last step, [layers], over this rank's heads; None before the first. clipped: the
    number of key/value groups clipped in it. Raises ValueError if QK-clip cannot match layers to
    weights.
    """

    def __init__(self, ctx: LayerContext) -> None:
        self.ctx = ctx
        self.layers: list[HeadMaxima] = []
        self.linears: list[nn.Module] = []  # the layers that compute queries, keys and values
        self.largest: Tensor | None = None
        self.clipped: Tensor | None = None
        self._eta: list[Tensor] = []  # [groups of this rank] of each layer

    def begin_step(self) -> None:
        """Discard the maxima recorded since the last step."""
        for layer in self.layers:
            if layer.noted is not None:
                layer.noted.fill_(-torch.inf)

    @torch.no_grad()
    def end_step(self, found_inf: Tensor) -> None:
        """Reduce the maxima over the ranks that have the same heads; compute the clip factors.

        found_inf: 1.0 if the update is skipped, and the clip with it.
        """
        noted = [layer.noted for layer in self.layers if layer.noted is not None]
        self._eta = []
        if not noted:
            return
        every = torch.cat(noted)
        if self.ctx.grid.dp_cp.size > 1:
            every = all_reduce(every, self.ctx.grid.dp_cp, op=MAX, label=LABEL)[0]
        parts = every.split([len(each) for each in noted])
        self.largest = torch.stack([part.amax() for part in parts])
        clip = self.ctx.qk_clip
        if clip is None:
            return
        if len(noted) != len(self.linears):
            raise ValueError(
                f"--qk-clip: {len(noted)} layers have attention, but {len(self.linears)} make "
                "queries and keys by qkv_linear (mpu/layers/qkv.py): each layer must use it"
            )
        shared = self.ctx.grid.tp_kv
        pairs = zip(parts, self.linears, strict=True)
        groups = [_group_maxima(part, linear) for part, linear in pairs]
        tops = torch.cat(groups)
        if shared.size > 1:  # its ranks hold other query heads of the same key head
            tops = all_reduce(tops, shared, op=MAX, label=LABEL)[0]
        over = (tops > clip.threshold) & torch.isfinite(tops) & (found_inf == 0)
        for part, linear in zip(over.split([len(g) for g in groups]), self.linears, strict=True):
            if not linear.weight.requires_grad:  # frozen
                part.fill_(False)
        eta = torch.where(over, clip.threshold / tops, torch.ones_like(tops))
        self.clipped = over.sum()
        self._eta = list(eta.split([len(each) for each in groups]))

    def row_factors(self) -> Iterator[Rows]:
        """Yield the weights, and biases if any, that QK-clip scales after the update."""
        clip = self.ctx.qk_clip
        assert clip is not None or not self._eta
        for linear, eta in zip(self.linears, self._eta, strict=bool(self._eta)):
            assert clip is not None
            q, k, v = _local_sections(linear)
            factors = torch.ones(q + k + v, dtype=eta.dtype, device=eta.device)
            factors[:q] = eta.pow(clip.alpha).repeat_interleave(q // len(eta))
            factors[q : q + k] = eta.pow(1 - clip.alpha).repeat_interleave(k // len(eta))
            for param in (linear.weight, linear.bias):
                if isinstance(param, nn.Parameter):
                    yield Rows(param, factors)


def _local_sections(linear: nn.Module) -> list[int]:
    """Return this rank's numbers of rows for queries, keys and values."""
    assert isinstance(linear.weight, nn.Parameter)
    place = placement_of(linear.weight)
    return [rows // place.axis.size for rows in place.sections]


def _group_maxima(maxima: Tensor, linear: nn.Module) -> Tensor:
    """Return the maximum of each key/value group that this rank attends with: [groups]."""
    assert isinstance(linear.weight, nn.Parameter)
    place = placement_of(linear.weight)
    q, k, _ = place.sections
    heads = len(maxima) * place.axis.size
    groups = heads * k // q
    return maxima.view(max(1, groups // place.axis.size), -1).amax(1)


def max_logits_of(ctx: LayerContext) -> MaxLogits | None:
    """Return the recorder of a rank's maxima; None if no flag requests them."""
    if not ctx.log_max_attention_logit and ctx.qk_clip is None:
        return None
    found = ctx.sink.state_of(MaxLogits)
    if found is None:
        found = MaxLogits(ctx)
        ctx.sink.step_states.append(found)
    return found


def head_maxima_of(ctx: LayerContext) -> HeadMaxima | None:
    """Return a new recorder for one more layer's maxima; None if no flag requests them."""
    every = max_logits_of(ctx)
    if every is None:
        return None
    every.layers.append(HeadMaxima(ctx))
    return every.layers[-1]
