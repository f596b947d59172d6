# SPDX-License-Identifier: Apache-2.0
"""Gather and sum through memory that the ranks of an axis share (mpu/comm/symmetric.py).

Every rank writes its tensor once and reads the others' in place. Sums are in rank order, the same
bits as through the process group. mpu/comm/collectives.py calls these where `shares` says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpu.comm.handle import Handle, Label, start
from mpu.grid import Axis


def shares(axis: Axis, x: Tensor) -> bool:
    """Say whether the axis' ranks see one another's x."""
    return axis.memory is not None and x.device.type == "cpu"


def _begin(
    verb: str,
    axis: Axis,
    x: Tensor,
    write: Callable[[Any], None],
    read: Callable[[Any], None],
    async_op: bool,
    label: Label | None,
) -> Handle:
    """Call write(turn), which signals; once all ranks have, the handle's wait calls read(turn)."""
    turns: list[Any] = []

    def call() -> Any:
        turns.append(axis.memory.begin(x.nbytes))
        write(turns[0])
        return turns[0]

    def finish() -> None:
        read(turns[0])
        turns[0].close()

    handle = start(verb, axis, x, call, (x,), finish, async_op, label)
    turns[0].complete = handle.wait
    return handle


def all_gather(
    x: Tensor, axis: Axis, async_op: bool, into: Tensor | None, label: Label | None
) -> tuple[Tensor, Handle]:
    """Write x; copy the other ranks' parts out."""
    n, x = x.shape[0], x.detach()
    shape = (axis.size * n, *x.shape[1:])
    out = into if into is not None else x.new_empty(shape)
    low, high = axis.rank * n, (axis.rank + 1) * n

    def read(turn: Any) -> None:
        whole = turn.whole(shape, x.dtype)
        turn.copy(out[:low], whole[:low])
        turn.copy(out[high:], whole[high:])
        if out[low:high].data_ptr() != x.data_ptr():
            turn.copy(out[low:high], x)

    return out, _begin("all_gather", axis, x, lambda turn: turn.put(x), read, async_op, label)


def reduce_scatter(
    x: Tensor, axis: Axis, async_op: bool, out: Tensor, label: Label | None
) -> tuple[Tensor, Handle]:
    """Write each other rank its slice of x, the next rank's first; add, in rank order, what they
    wrote for this one.
    """
    rank, size = axis.rank, axis.size
    slices = x.detach().unflatten(0, (size, -1))
    own = slices[rank]

    def write(turn: Any) -> None:
        written = turn.part(rank, tuple(slices.shape), x.dtype)
        for owner in axis.following:
            turn.copy(written[owner], slices[owner])
            turn.signal(owner)
        turn.signal(rank)

    def read(turn: Any) -> None:
        parts = list(turn.whole((size, *slices.shape), x.dtype)[:, rank])
        # `out` may be that slice of x, and is overwritten by the first two parts
        aside = rank > 1 and out.data_ptr() == own.data_ptr()
        parts[rank] = own.clone() if aside else own
        sum_of_parts(parts, out)

    return out, _begin("reduce_scatter", axis, x, write, read, async_op, label)


def all_reduce(
    x: Tensor, axis: Axis, async_op: bool, label: Label | None
) -> tuple[Tensor, Handle]:
    """Sum x (contiguous) in place: two ranks add all of it, more of them a piece each.

    The pieces are exchanged at once, async_op or not: flags only go up, so the second phase must be
    signalled before a later turn begins.
    """

    def read(turn: Any) -> None:
        parts, n = turn.whole((axis.size, x.numel()), x.dtype), x.numel()
        if axis.size == 2:
            sum_of_parts(parts.view(2, *x.shape), x)
            return
        flat = x.view(-1)
        bounds = [n * r // axis.size for r in range(axis.size + 1)]
        low, high = bounds[axis.rank], bounds[axis.rank + 1]
        sum_of_parts(parts[:, low:high], flat[low:high])
        parts[axis.rank, low:high] = flat[low:high]  # in the place of what only this rank has read
        turn.phase = 1
        turn.signal_all()
        turn.wait()
        for r, row in enumerate(parts):
            flat[bounds[r] : bounds[r + 1]] = row[bounds[r] : bounds[r + 1]]

    write, once = (lambda turn: turn.put(x.detach())), axis.size > 2
    return x, _begin("all_reduce", axis, x, write, read, async_op and not once, label)


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
