# SPDX-License-Identifier: Apache-2.0
"""The collectives of an axis: (tensor, axis, async_op) -> (out, handle). No autograd here.

    all_reduce, all_gather, reduce_scatter, all_to_all
    all_reduce_in_order, sum_in_order, barrier, gather_bytes    built on these

Every collective is the identity at axis size 1, with no process group at all. Gathers and scatters
cut dim 0, so a shard is contiguous. Reductions are sums; only `all_reduce` takes another op.
`reduce_scatter` and `all_reduce_in_order` add the ranks' contributions in rank order on CPU
(docs/numerics.md). gloo's own reduce-scatter does not, puts twice the bytes on the wire, and is
slower than the all-to-all used here.

The axis' transport executes them. ProcessGroupTransport, below, uses torch.distributed. Where the
ranks of an axis share memory, SharedMemoryTransport (mpu/comm/shared_memory.py) runs gathers, sums
and exchanges: a tensor is written once and read in place, and sums are in rank order.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.comm.transport import DONE, Axis, Handle, Label, Splits, Transport

MAX = dist.ReduceOp.MAX
# torch 2.13 renames these two and warns about the old names; 2.11 and 2.12 have only the old ones
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(
    x: Tensor,
    axis: Axis,
    async_op: bool = False,
    op: Any = dist.ReduceOp.SUM,
    label: Label | None = None,
) -> tuple[Tensor, Handle]:
    """Sum x over the axis (or combine it by `op`), in place, in the transport's own order."""
    if axis.size == 1:
        return x, DONE
    return axis.required_transport.all_reduce(x, axis, async_op, op, label)


def all_gather(
    x: Tensor,
    axis: Axis,
    async_op: bool = False,
    into: Tensor | None = None,
    label: Label | None = None,
) -> tuple[Tensor, Handle]:
    """Concatenate the ranks' x along dim 0: [n, ...] -> [t*n, ...].

    into: a tensor for the result, of which x may be this rank's own part.
    """
    if axis.size == 1:
        return x, DONE
    return axis.required_transport.all_gather(x, axis, async_op, into, label)


def reduce_scatter(
    x: Tensor,
    axis: Axis,
    async_op: bool = False,
    into: Tensor | None = None,
    label: Label | None = None,
) -> tuple[Tensor, Handle]:
    """Sum x over the axis and keep this rank's slice of dim 0: [t*n, ...] -> [n, ...].

    On gloo: all-to-all, then this rank adds the t contributions in rank order, bf16 ones in fp32.
    into: a tensor for the result, which may be that very slice of x. Where its dtype is not x's,
    NCCL does the same as gloo, so that contributions are rounded but not their sum.
    """
    if axis.size == 1:
        return x, DONE
    assert x.shape[0] % axis.size == 0, "dim 0 must divide by the axis"
    return axis.required_transport.reduce_scatter(x, axis, async_op, into, label)


def all_to_all(
    x: Tensor,
    axis: Axis,
    async_op: bool = False,
    splits: Splits | None = None,
    label: Label | None = None,
) -> tuple[Tensor, Handle]:
    """Send each rank its rows of dim 0; return the received rows, in rank order.

        rank 0   a0 a1           rank 0   a0 b0
        rank 1   b0 b1     ->    rank 1   a1 b1

    splits: the rows sent to and received from each rank; None, on all ranks: [t*n, ...] has n for
    each. Used by Ulysses (Jacobs et al. 2023) and mixtures of experts.
    """
    if splits is None:
        assert x.shape[0] % axis.size == 0, "dim 0 must divide by the axis"
    else:
        assert len(splits.input) == len(splits.output) == axis.size, "one split for each rank"
        assert sum(splits.input) == len(x), "the splits must cover dim 0"
    if axis.size == 1:
        return x, DONE
    return axis.required_transport.all_to_all(x, axis, async_op, splits, label)


def all_reduce_in_order(x: Tensor, axis: Axis, label: Label | None = None) -> Tensor:
    """Sum x over the axis in place; on CPU the bits do not depend on how x is cut or batched.

    On CPU it is a reduce-scatter, which adds in rank order, then an all-gather, with x padded to a
    multiple of the axis size; on NCCL it is an all-reduce.
    """
    if axis.size == 1:
        return x
    if axis.on_gpu(x) and not axis.staged:
        return all_reduce(x, axis, label=label)[0]
    flat = x.reshape(-1)
    pad = -flat.numel() % axis.size
    padded = torch.cat([flat, flat.new_zeros(pad)]) if pad else flat
    shard, _ = reduce_scatter(padded, axis, label=label)
    full, _ = all_gather(shard, axis, label=label)
    return x.copy_(full[: flat.numel()].view_as(x))


def sum_in_order(x: Tensor, axis: Axis, label: Label | None = None) -> Tensor:
    """Return the sum of a few numbers over the axis, in rank order, by one all-gather."""
    if axis.size == 1:
        return x
    every = all_gather(x[None], axis, label=label)[0]
    total = every[0].clone()
    for part in every[1:]:
        total += part
    return total


def barrier(axis: Axis, device: torch.device | None = None) -> None:
    """Wait for every rank of the axis."""
    all_reduce(torch.zeros(1, device=device), axis)


def gather_bytes(data: bytes, axis: Axis, device: torch.device | None = None) -> list[bytes]:
    """Return the bytes of every rank, in axis order. Nothing is unpickled."""
    if axis.size == 1:
        return [data]
    return axis.required_transport.gather_bytes(data, axis, device)


class ProcessGroupTransport(Transport):
    """Communicates through a process group of torch.distributed (gloo or NCCL).

    staged: the group is gloo's, and GPU tensors are copied through host memory.
    why_not: why the ranks cannot access one another's memory; empty if that was not tried.
    sends: whether data is sent; False in MetaTransport (mpu/comm/meta.py).
    """

    sends = True

    def __init__(self, group: Any, staged: bool = False, why_not: str = "") -> None:
        self.group, self.staged, self.why_not = group, staged, why_not

    def adds(self, x: Tensor, out: Tensor) -> bool:
        """Return whether the backend's own reduce-scatter is used: on NCCL, if the dtypes agree."""
        return self.on_gpu(x) and not self.staged and out.dtype == x.dtype

    def all_reduce(
        self, x: Tensor, axis: Axis, async_op: bool, op: Any, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Sum x in place, in the backend's own order."""
        wire = to_wire(x, self.staged)
        with axis.start("all_reduce", x, async_op=async_op, label=label) as handle:
            if self.sends:
                handle.work = dist.all_reduce(wire, op=op, group=self.group, async_op=True)
            handle.keep, handle.finish = (wire,), _copy_back(wire, x)
        return x, handle

    def all_gather(
        self, x: Tensor, axis: Axis, async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Gather into `into`, or into a new tensor."""
        wire = to_wire(x, self.staged)
        result = into if into is not None else x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
        out = torch.empty_like(result, device=wire.device) if self.staged else result
        with axis.start("all_gather", x, async_op=async_op, label=label) as handle:
            if self.sends:
                handle.work = _all_gather(out, wire, group=self.group, async_op=True)
            handle.keep, handle.finish = (wire, out), _copy_to(result, out)
        return result, handle

    def reduce_scatter(
        self, x: Tensor, axis: Axis, async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Use NCCL's own where the dtypes agree; else exchange the slices and add them in order."""
        shape = (x.shape[0] // axis.size, *x.shape[1:])
        wire = to_wire(x, self.staged)
        out = torch.empty(shape, dtype=x.dtype, device=x.device) if into is None else into
        if self.adds(x, out):
            with axis.start("reduce_scatter", x, async_op=async_op, label=label) as handle:
                if self.sends:
                    handle.work = _reduce_scatter(out, wire, group=self.group, async_op=True)
                handle.keep = wire, out
            return out, handle
        parts = torch.empty_like(wire)

        def finish() -> None:
            sum_of_parts(parts.view(axis.size, *shape), out)

        verb = "all_to_all" if self.on_gpu(x) and not self.staged else "reduce_scatter"
        with axis.start(verb, x, async_op=async_op, label=label) as handle:
            if self.sends:
                handle.work = dist.all_to_all_single(parts, wire, group=self.group, async_op=True)
            handle.keep, handle.finish = (wire, parts), finish
        return out, handle

    def all_to_all(
        self, x: Tensor, axis: Axis, async_op: bool, splits: Splits | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Exchange rows with the backend's own all-to-all."""
        wire = to_wire(x, self.staged)
        out = x.new_empty((len(x) if splits is None else sum(splits.output), *x.shape[1:]))
        arrived = torch.empty_like(out, device=wire.device) if self.staged else out
        come, go = (None, None) if splits is None else (list(splits.output), list(splits.input))
        with axis.start("all_to_all", x, async_op=async_op, label=label, splits=splits) as handle:
            if self.sends:
                handle.work = dist.all_to_all_single(
                    arrived, wire, come, go, group=self.group, async_op=True
                )
            handle.keep, handle.finish = (wire, arrived), _copy_to(out, arrived)
        return out, handle

    def send(self, x: Tensor, axis: Axis, to: int, label: Label | None) -> Handle:
        """Send with the backend's isend."""
        wire, peer = to_wire(x, self.staged), axis.ranks[to]
        with axis.start("send", x, async_op=True, label=label, peer=peer) as handle:
            if self.sends:
                handle.work = dist.isend(wire, peer, group=self.group)
            handle.keep = (wire,)
        return handle

    def receive(self, out: Tensor, axis: Axis, source: int, label: Label | None) -> Handle:
        """Receive with the backend's irecv."""
        wire, peer = _room(out, self.staged), axis.ranks[source]
        with axis.start("receive", out, async_op=True, label=label, peer=peer) as handle:
            if self.sends:
                handle.work = dist.irecv(wire, peer, group=self.group)
            handle.keep, handle.finish = (wire,), _copy_to(out, wire)
        return handle

    def exchange(
        self, x: Tensor, axis: Axis, to: int, source: int, into: Tensor, label: Label | None
    ) -> Handle:
        """Start both as one batch, so that neither waits for the other."""
        wire, out, peer = to_wire(x, self.staged), _room(into, self.staged), axis.ranks[source]
        with axis.start("send", x, async_op=True, label=label, peer=peer) as handle:
            if self.sends:
                handle.work = _exchange(wire, axis.ranks[to], out, peer, self.group)
            handle.keep, handle.finish = (wire, out), _copy_to(into, out)
        return handle

    def gather_bytes(self, data: bytes, axis: Axis, device: torch.device | None) -> list[bytes]:
        """Gather the sizes first, then rows of the largest."""
        size = torch.tensor([len(data)], dtype=torch.int64, device=device)
        sizes = all_gather(size, axis)[0].tolist()
        padded = torch.zeros(max([*sizes, 1]), dtype=torch.uint8, device=device)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = all_gather(padded[None], axis)[0].cpu()
        return [row[:n].numpy().tobytes() for row, n in zip(rows, sizes, strict=True)]


def _exchange(x: Tensor, to: int, out: Tensor, source: int, group: Any) -> "_Both":
    send, receive = dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, out, source, group)
    return _Both(dist.batch_isend_irecv([send, receive]))


class _Both:
    """Several messages with one wait."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def by_process_group(axis: Axis, why_not: str = "") -> Axis:
    """Return the axis with its process group as its transport.

    why_not: why its ranks share no memory.
    """
    plain = ProcessGroupTransport(group_of(axis), axis.staged, why_not)
    return replace(axis, transport=plain)


def group_of(axis: Axis) -> Any:
    """Return the process group of an axis whose transport has one."""
    transport = axis.required_transport
    assert isinstance(transport, ProcessGroupTransport), f"{axis.name} has no process group"
    return transport.group


def to_wire(x: Tensor, staged: bool) -> Tensor:
    """Return x as the backend needs it: contiguous, and in host memory if the axis is staged."""
    return x.detach().cpu().contiguous() if staged else x.detach().contiguous()


def _room(out: Tensor, staged: bool) -> Tensor:
    """Return a receive buffer for `out`: `out` itself, or host memory if the axis is staged."""
    return torch.empty_like(out, device="cpu") if staged else out


def _copy_to(out: Tensor, arrived: Tensor) -> Callable[[], object] | None:
    """Return a function that copies `arrived` to `out`; None if they are the same tensor."""
    return None if arrived is out else partial(out.copy_, arrived)


def _copy_back(wire: Tensor, x: Tensor) -> Callable[[], object] | None:
    """Return a function that copies `wire` back to x; None if `wire` is x itself."""
    return None if wire.data_ptr() == x.data_ptr() else partial(x.copy_, wire)


def sum_of_parts(parts: Sequence[Tensor] | Tensor, out: Tensor) -> None:
    """out = parts[0] + parts[1] + ..., left to right; 16-bit parts in fp32, rounded once."""
    first, second = parts[0], parts[1]
    if first.element_size() >= 4 or (len(parts) == 2 and out.dtype == first.dtype):
        if out.device == first.device:
            torch.add(first, second, out=out)
        else:
            out.copy_(first + second)
        for part in parts[2:]:
            out.add_(part.to(out.device))
        return
    total = first.float()
    for part in parts[1:]:
        total += part
    out.copy_(total)
