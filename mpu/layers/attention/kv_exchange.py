# SPDX-License-Identifier: Apache-2.0
"""Bring keys and values to the queries of a context-parallel rank: by all-gather or by a ring.

    Gather   forward    start gather | own keys | all other keys
             backward   start gather | half of own keys | all other keys |
                        start reduce-scatter of dK, dV | the other half of own keys
    Ring     forward    own keys | keys of the previous rank | of the one before it | ...
                        each while the next keys are in flight
             backward   half of own keys | keys of the previous rank | ... | the other half of own
                        keys; dK, dV follow their keys one step later, back to their own rank

Both run inside one autograd function, `ContextExchange`, which saves only this rank's q, k, v,
output and log-sum-exp. K and V are sent as one tensor [s, b, g, d + e], d being the size of a
key and e that of a value.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from mpu.comm.collectives import all_gather, reduce_scatter
from mpu.comm.p2p import exchange
from mpu.comm.transport import DONE, Axis, Handle, Label
from mpu.layers.attention.backends import Kernel
from mpu.layers.attention.block_attention import (
    accumulate_dtype,
    attend,
    attend_backward,
    block_gradients,
    merge_sink,
    outputs,
    sink_gradient,
)
from mpu.layers.attention.max_logits import Noted
from mpu.layers.attention.shards import Ranges, gather_blocks, halves, ring_blocks

FORWARD, BACKWARD = Label("core_attention", "forward"), Label("core_attention", "backward")
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, out, lse


class Way(Protocol):
    """A way to exchange keys and values. All tensors are [b, n, s, d], views of [s, b, n, d]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Fill out and lse."""

    def backward(self, dy: Tensor, saved: Saved, dq: Tensor) -> Tensor:
        """Add to dq; return dK and dV of this rank's tokens, [s, b, g, d + e]. saved: q to lse."""


class ContextExchange(torch.autograd.Function):
    """q [s, b, a, d], k [s, b, g, d], v [s, b, g, e] of this rank's tokens, way, sink [a] or None
    -> [s, b, a, e].
    """

    @staticmethod
    def forward(
        saved_ctx: Any, q: Tensor, k: Tensor, v: Tensor, way: Way, sink: Tensor | None = None
    ) -> Tensor:
        heads, values = _heads(q), _heads(v)
        out, lse = outputs(heads, values, accumulate_dtype(q))
        way.forward(heads, _heads(k), values, out, lse)
        if sink is not None:
            merge_sink(out, lse, sink)
        out = out.to(q.dtype)
        saved_ctx.way = way
        saved_ctx.save_for_backward(q, k, v, out, lse, sink)
        return out.permute(2, 0, 1, 3)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink = saved_ctx.saved_tensors
        dq = q.new_zeros(q.shape, dtype=accumulate_dtype(q))
        saved = (_heads(q), _heads(k), _heads(v), out, lse)
        dkv = saved_ctx.way.backward(_heads(dy), saved, _heads(dq)).to(q.dtype)
        dk, dv = dkv.split([k.shape[3], v.shape[3]], 3)
        return dq.to(q.dtype), dk, dv, None, sink_gradient(_heads(dy), out, lse, sink)


class Gather:
    """Gather all keys at once. ranges: the positions of each rank's tokens (shards.py). noted:
    where forward records each head's largest logit (max_logits.py); None: it does not.
    """

    def __init__(
        self,
        axis: Axis,
        ranges: tuple[Ranges, ...],
        documents: tuple[int, ...],
        window: int,
        kernel: Kernel,
        noted: Noted | None = None,
    ) -> None:
        self.axis, self.ranges, self.kernel, self.noted = axis, ranges, kernel, noted
        self.blocks = gather_blocks(axis.rank, ranges, documents, window)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Attend to own keys while the other ranks' keys are gathered."""
        mine = _together(k, v)
        parts, handle = all_gather(mine, self.axis, async_op=True, label=FORWARD)
        attend(self.blocks.near, q, k, v, out, lse, kernel=self.kernel, noted=self.noted)
        handle.wait()
        del mine
        every = parts.index_select(0, in_order(self.ranges, q.device))
        del parts
        theirs = _unstack(every, k)
        attend(self.blocks.far, q, *theirs, out, lse, kernel=self.kernel, noted=self.noted)

    def backward(self, dy: Tensor, saved: Saved, dq: Tensor) -> Tensor:
        """Gather again. dK and dV of the far blocks are summed in the accumulation dtype, one piece
        of the row at a time, and overwrite the keys of the piece; the reduce-scatter then adds the
        ranks' contributions in rank order.
        """
        q, k, v, out, lse = saved
        early, late = halves(self.blocks.near)
        mine = _together(k, v)
        parts, handle = all_gather(mine, self.axis, async_op=True, label=BACKWARD)
        found = [*block_gradients(early, dy, saved, dq, self.kernel)]
        handle.wait()
        del mine
        order, back = in_order(self.ranges, q.device), by_rank(self.ranges, q.device)
        every = parts.index_select(0, order)
        del parts
        size = every.shape[0] // self.axis.size
        for first, todo in zip(range(0, len(order), size), self.blocks.pieces, strict=True):
            keys = every[first : first + size]
            part = torch.zeros_like(keys, dtype=dq.dtype)
            sums = (dq, *_unstack(part, k))
            attend_backward(todo, dy, (q, *_unstack(keys, k), out, lse), sums, self.kernel)
            keys.copy_(part)  # from here on `every` holds their gradients
            del keys, part, sums
        sent = every.index_select(0, back)
        del every
        theirs, handle = reduce_scatter(sent, self.axis, async_op=True, label=BACKWARD)
        del sent
        found += block_gradients(late, dy, saved, dq, self.kernel)
        handle.wait()
        return _added(found, theirs.to(dq.dtype), k)


class Ring:
    """Pass keys around a ring, one rank's at a time. The arguments are those of Gather."""

    def __init__(
        self,
        axis: Axis,
        ranges: tuple[Ranges, ...],
        documents: tuple[int, ...],
        window: int,
        kernel: Kernel,
        noted: Noted | None = None,
    ) -> None:
        self.axis, self.kernel, self.noted = axis, kernel, noted
        self.blocks = ring_blocks(axis.rank, ranges, documents, window)

    def _pass_on(self, x: Tensor, label: Label) -> tuple[Tensor, Handle]:
        """Start sending x to the next rank and receiving the same shape from the previous one."""
        size, rank = self.axis.size, self.axis.rank
        if size == 1:
            return x, DONE
        into = torch.empty_like(x)
        return into, exchange(x, self.axis, (rank + 1) % size, (rank - 1) % size, into, label)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Attend to one rank's keys while the next ones are in flight."""
        here, size = _together(k, v), self.axis.size
        for step in range(size):
            coming, handle = here, DONE
            if step + 1 < size:
                coming, handle = self._pass_on(here, FORWARD)
            todo = self.blocks[(self.axis.rank - step) % size]
            attend(todo, q, *_unstack(here, k), out, lse, kernel=self.kernel, noted=self.noted)
            handle.wait()
            here = coming

    def backward(self, dy: Tensor, saved: Saved, dq: Tensor) -> Tensor:
        """Pass the keys around again. The sum of a rank's dK and dV starts at the next rank,
        follows the keys one step later, and returns while the rank processes the second half of its
        own blocks.
        """
        q, k, v, out, lse = saved
        rank, size = self.axis.rank, self.axis.size
        early, late = halves(self.blocks[rank])
        coming, handle = self._pass_on(_together(k, v), BACKWARD)
        found = [*block_gradients(early, dy, saved, dq, self.kernel)]
        sums, arrives = None, DONE
        for step in range(1, size):
            handle.wait()
            here = coming
            if step + 1 < size:
                coming, handle = self._pass_on(here, BACKWARD)
            todo = self.blocks[(rank - step) % size]
            tensors = (q, *_unstack(here, k), out, lse)
            theirs = [*block_gradients(todo, dy, tensors, dq, self.kernel)]
            arrives.wait()
            sums = _added(theirs, _zeros(k, v, dq.dtype) if sums is None else sums, k)
            del here, tensors, theirs
            sums, arrives = self._pass_on(sums, BACKWARD)
        del coming
        found += block_gradients(late, dy, saved, dq, self.kernel)
        arrives.wait()
        return _added(found, _zeros(k, v, dq.dtype) if sums is None else sums, k)


def _heads(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)  # [s, b, n, d] -> [b, n, s, d]


def _together(k: Tensor, v: Tensor) -> Tensor:
    """Return a copy of K [b, g, s, d] and V [b, g, s, e] as one message [s, b, g, d + e]."""
    return torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], 3)


def _zeros(k: Tensor, v: Tensor, kind: torch.dtype) -> Tensor:
    b, g, s, d = k.shape
    return k.new_zeros((s, b, g, d + v.shape[3]), dtype=kind)


def _unstack(kv: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Split a message into K and V, [b, g, s, d] and [b, g, s, e]. k: keys of size d."""
    d = k.shape[3]
    keys, values = _heads(kv).split([d, kv.shape[3] - d], 3)
    return keys, values


def _added(found: Sequence[tuple[slice, Tensor, Tensor]], dkv: Tensor, k: Tensor) -> Tensor:
    """Add blocks' dk and dv to the sums dkv [s, b, g, d + e]; return them. k: keys of size d."""
    for at, *parts in found:
        for total, part in zip(_unstack(dkv, k), parts, strict=True):
            total[:, :, at] += part
    return dkv


def in_order(ranges: tuple[Ranges, ...], device: torch.device) -> Tensor:
    """Return the index that sorts the ranks' tokens, concatenated in rank order, by position:
    int64 [s]. The copy to CUDA is asynchronous.
    """
    return _on(device, _in_order(ranges)[0])


def by_rank(ranges: tuple[Ranges, ...], device: torch.device) -> Tensor:
    """Return the inverse of `in_order`: int64 [s]. The copy to CUDA is asynchronous."""
    return _on(device, _in_order(ranges)[1])


def _on(device: torch.device, index: Tensor) -> Tensor:
    if device.type == "cuda":
        index = index.pin_memory()
    return index.to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _in_order(ranges: tuple[Ranges, ...]) -> tuple[Tensor, Tensor]:
    order = torch.cat([torch.arange(r.start, r.stop) for part in ranges for r in part]).argsort()
    return order, order.argsort()
