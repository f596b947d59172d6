# SPDX-License-Identifier: Apache-2.0
"""Gather and sum through memory that the ranks of an axis share (mpu/comm/symmetric.py).

Every rank writes its tensor once and reads the others' in place. Sums are in rank order. The
process group carries GPU tensors, messages and reductions other than sums.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.comm.collectives import ProcessGroupTransport, sum_of_parts
from mpu.comm.symmetric import copy
from mpu.comm.transport import Axis, Handle, Label
from mpu.comm.workspace import Turn, Workspace


class SharedMemoryTransport(ProcessGroupTransport):
    """Carries gathers and sums of CPU tensors by a workspace, the rest by the process group.

    The workspace may be shared with other axes over the same ranks.
    """

    symmetric = True

    def __init__(self, group: Any, workspace: Workspace, staged: bool = False) -> None:
        super().__init__(group, staged)
        self.workspace = workspace

    def all_reduce(
        self, x: Tensor, axis: Axis, op: Any, async_op: bool, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Sum x in place: two ranks add all of it each; more ranks add a piece each.

        Pieces are exchanged before the call returns, async_op or not: flags only go up, so the
        second phase must be signalled before a later turn begins.
        """
        if op != dist.ReduceOp.SUM or not x.is_contiguous() or x.device.type != "cpu":
            return super().all_reduce(x, axis, op, async_op, label)

        def read(turn: Turn) -> None:
            parts, n = turn.whole((axis.size, x.numel()), x.dtype), x.numel()
            if axis.size == 2:
                sum_of_parts(parts.view(2, *x.shape), x)
                return
            flat = x.view(-1)
            bounds = [n * r // axis.size for r in range(axis.size + 1)]
            low, high = bounds[axis.rank], bounds[axis.rank + 1]
            sum_of_parts(parts[:, low:high], flat[low:high])
            # over the piece of its own part, which only this rank has read
            parts[axis.rank, low:high] = flat[low:high]
            turn.phase = 1
            turn.signal_all()
            turn.wait()
            for r, row in enumerate(parts):
                flat[bounds[r] : bounds[r + 1]] = row[bounds[r] : bounds[r + 1]]

        write, later = (lambda turn: turn.put(x.detach())), async_op and axis.size == 2
        return x, self.begin("all_reduce", axis, x, write, read, async_op=later, label=label)

    def all_gather(
        self, x: Tensor, axis: Axis, into: Tensor | None, async_op: bool, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Write x, then copy the other ranks' parts out."""
        if x.device.type != "cpu":
            return super().all_gather(x, axis, into, async_op, label)
        n, x = x.shape[0], x.detach()
        shape = (axis.size * n, *x.shape[1:])
        out = into if into is not None else x.new_empty(shape)
        low, high = axis.rank * n, (axis.rank + 1) * n

        def read(turn: Turn) -> None:
            every = turn.whole(shape, x.dtype)
            copy(out[:low], every[:low])
            copy(out[high:], every[high:])
            if out[low:high].data_ptr() != x.data_ptr():
                copy(out[low:high], x)

        write = lambda turn: turn.put(x)  # noqa: E731
        return out, self.begin("all_gather", axis, x, write, read, async_op=async_op, label=label)

    def reduce_scatter(
        self, x: Tensor, axis: Axis, into: Tensor | None, async_op: bool, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Write the other ranks' slices of x, the next rank's first; then add the slices that the
        ranks wrote for this one, in rank order.
        """
        if x.device.type != "cpu":
            return super().reduce_scatter(x, axis, into, async_op, label)
        rank, size = axis.rank, axis.size
        slices = x.detach().unflatten(0, (size, -1))
        own = slices[rank]
        out = torch.empty_like(own, memory_format=torch.contiguous_format) if into is None else into

        def write(turn: Turn) -> None:
            written = turn.part(rank, tuple(slices.shape), x.dtype)
            for owner in axis.following:
                copy(written[owner], slices[owner])
                turn.signal(owner)
            turn.signal(rank)

        def read(turn: Turn) -> None:
            parts = list(turn.whole((size, *slices.shape), x.dtype)[:, rank])
            # `out` may be this slice of x; the sum of the first two parts overwrites it
            aside = rank > 1 and out.data_ptr() == own.data_ptr()
            parts[rank] = own.clone() if aside else own
            sum_of_parts(parts, out)

        handle = self.begin("reduce_scatter", axis, x, write, read, async_op=async_op, label=label)
        return out, handle

    def begin(
        self,
        verb: str,
        axis: Axis,
        x: Tensor,
        write: Callable[[Turn], None],
        read: Callable[[Turn], None],
        async_op: bool,
        label: Label | None,
    ) -> Handle:
        """Call write(turn), which signals. The handle waits for all ranks' signals, then reads."""
        turns: list[Turn] = []

        def call() -> Turn:
            turns.append(self.workspace.begin(x.nbytes))
            write(turns[0])
            return turns[0]

        def finish() -> None:
            read(turns[0])
            turns[0].close()

        handle = axis.start(verb, x, call, (x,), finish, async_op=async_op, label=label)
        turns[0].complete = handle.wait
        return handle
