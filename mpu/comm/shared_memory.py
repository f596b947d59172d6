# SPDX-License-Identifier: Apache-2.0
"""Collectives through memory that the ranks of one host share (mpu/comm/symmetric.py).

Every rank writes its tensor once and reads the other ranks' tensors in place. Sums are in rank
order. GPU tensors, messages and reductions other than sums use the process group.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.comm.collectives import ProcessGroupTransport, sum_of_parts
from mpu.comm.symmetric import copy
from mpu.comm.transport import Axis, Handle, Label, Splits
from mpu.comm.workspace import Epoch, Workspace

SMALL = 4096  # bytes up to which each rank adds whole tensors: one wait instead of two


class SharedMemoryTransport(ProcessGroupTransport):
    """Exchanges CPU tensors through a workspace, everything else through the process group.

    The workspace may be shared with other axes over the same ranks.
    """

    symmetric = True

    def __init__(self, group: Any, workspace: Workspace, staged: bool = False) -> None:
        super().__init__(group, staged)
        self.workspace = workspace

    def all_reduce(
        self, x: Tensor, axis: Axis, async_op: bool, op: Any, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Sum x in place. With two ranks, or if x is SMALL, each rank adds all of x; else each rank
        adds a piece, and the ranks exchange the sums.

        The pieces are exchanged before the call returns, even with async_op: flags only increase,
        so the second phase must be signalled before a later epoch begins.
        """
        if op != dist.ReduceOp.SUM or not x.is_contiguous() or x.device.type != "cpu":
            return super().all_reduce(x, axis, async_op, op, label)

        at_once = axis.size == 2 or x.nbytes <= SMALL

        def read(epoch: Epoch) -> None:
            if at_once:
                sum_of_parts(epoch.gathered((axis.size, *x.shape), x.dtype), x)
                return
            parts, n = epoch.gathered((axis.size, x.numel()), x.dtype), x.numel()
            flat = x.view(-1)
            bounds = [n * r // axis.size for r in range(axis.size + 1)]
            low, high = bounds[axis.rank], bounds[axis.rank + 1]
            sum_of_parts(parts[:, low:high], flat[low:high])
            # overwrites this piece of its own part, which only this rank reads
            parts[axis.rank, low:high] = flat[low:high]
            epoch.phase = 1
            epoch.signal_all()
            epoch.wait()
            for r, row in enumerate(parts):
                flat[bounds[r] : bounds[r + 1]] = row[bounds[r] : bounds[r + 1]]

        write, later = (lambda epoch: epoch.put(x.detach())), async_op and at_once
        return x, self.begin("all_reduce", axis, x, write, read, async_op=later, label=label)

    def all_gather(
        self, x: Tensor, axis: Axis, async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Write x, then copy out the other ranks' parts."""
        if x.device.type != "cpu":
            return super().all_gather(x, axis, async_op, into, label)
        n, x = x.shape[0], x.detach()
        shape = (axis.size * n, *x.shape[1:])
        out = into if into is not None else x.new_empty(shape)
        low, high = axis.rank * n, (axis.rank + 1) * n

        def read(epoch: Epoch) -> None:
            every = epoch.gathered(shape, x.dtype)
            copy(out[:low], every[:low])
            copy(out[high:], every[high:])
            if out[low:high].data_ptr() != x.data_ptr():
                copy(out[low:high], x)

        write = lambda epoch: epoch.put(x)  # noqa: E731
        return out, self.begin("all_gather", axis, x, write, read, async_op=async_op, label=label)

    def reduce_scatter(
        self, x: Tensor, axis: Axis, async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Write the other ranks' slices of x, the next rank's first; then add the slices that the
        ranks wrote for this one, in rank order.
        """
        if x.device.type != "cpu":
            return super().reduce_scatter(x, axis, async_op, into, label)
        rank, size, dtype = axis.rank, axis.size, x.dtype
        slices = x.detach().chunk(size)
        own = slices[rank]
        shape, nbytes = tuple(own.shape), own.nbytes  # of a slice
        out = torch.empty_like(own, memory_format=torch.contiguous_format) if into is None else into

        def write(epoch: Epoch) -> None:
            for owner in axis.following:
                copy(epoch.part(rank, shape, dtype, owner * nbytes), slices[owner])
                epoch.signal(owner)
            epoch.signal(rank)

        def read(epoch: Epoch) -> None:
            # `out` may be this slice of x; the sum of the first two parts overwrites it
            aside = rank > 1 and out.data_ptr() == own.data_ptr()
            mine = own.clone() if aside else own
            theirs = partial(epoch.part, shape=shape, dtype=dtype, offset=rank * nbytes)
            sum_of_parts([mine if r == rank else theirs(r) for r in range(size)], out)

        handle = self.begin("reduce_scatter", axis, x, write, read, async_op=async_op, label=label)
        return out, handle

    def all_to_all(
        self, x: Tensor, axis: Axis, async_op: bool, splits: Splits | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Write the rows for other ranks; copy out the rows for this rank.

        All ranks compare uneven splits before the call returns, even with async_op.
        """
        if x.device.type != "cpu":
            return super().all_to_all(x, axis, async_op, splits, label)
        size, rank, x, width = axis.size, axis.rank, x.detach(), tuple(x.shape[1:])
        if splits is None:
            every = [[len(x) // size] * size] * size
        else:
            every = self._splits_of_all(splits, axis)
        rows = [sum(row) for row in every]  # sent by each rank
        part_bytes = max(rows) * torch.Size(width).numel() * x.itemsize
        own = x.split(every[rank])
        out = x.new_empty((sum(row[rank] for row in every), *width))
        into = out.split([row[rank] for row in every])

        def write(epoch: Epoch) -> None:
            written = epoch.part(rank, tuple(x.shape), x.dtype).split(every[rank])
            for owner in axis.following:
                copy(written[owner], own[owner])
                epoch.signal(owner)
            epoch.signal(rank)

        def read(epoch: Epoch) -> None:
            for source in axis.following:
                part = epoch.part(source, (rows[source], *width), x.dtype)
                copy(into[source], part.split(every[source])[rank])
            into[rank].copy_(own[rank])

        how: Any = dict(async_op=async_op, label=label, part_bytes=part_bytes, splits=splits)
        return out, self.begin("all_to_all", axis, x, write, read, **how)

    def _splits_of_all(self, splits: Splits, axis: Axis) -> list[list[int]]:
        """Return the number of rows that each rank sends to each. Raises ValueError, on all ranks,
        if a rank expects a different number of rows than another sends it.
        """
        both = torch.tensor(splits, dtype=torch.int64)  # [2, t]
        epoch = self.workspace.begin(both.nbytes)
        epoch.put(both)
        epoch.wait()
        table = epoch.gathered((axis.size, 2, axis.size), both.dtype).clone()
        epoch.close()
        sent, expected = table[:, 0], table[:, 1].t()
        if len(wrong := (sent != expected).nonzero()):
            source, to = wrong[0].tolist()
            raise ValueError(
                f"all_to_all over {axis.name}: rank {axis.ranks[source]} sends "
                f"{sent[source, to]} rows to rank {axis.ranks[to]}, which expects "
                f"{expected[source, to]}"
            )
        return sent.tolist()

    def begin(
        self,
        verb: str,
        axis: Axis,
        x: Tensor,
        write: Callable[[Epoch], None],
        read: Callable[[Epoch], None],
        async_op: bool,
        label: Label | None,
        part_bytes: int | None = None,
        splits: Splits | None = None,
    ) -> Handle:
        """Call write(epoch), which signals; return a handle that waits for all ranks, then reads.

        part_bytes: size of each rank's part, equal on all ranks; None: the size of x. splits: see
        Axis.start.
        """
        with axis.start(verb, x, async_op=async_op, label=label, splits=splits) as handle:
            handle.keep = (x,)
            epoch = self.workspace.begin(x.nbytes if part_bytes is None else part_bytes)
            write(epoch)

            def finish() -> None:
                read(epoch)
                epoch.close()

            handle.work, handle.finish, epoch.complete = epoch, finish, handle.wait
        return handle
