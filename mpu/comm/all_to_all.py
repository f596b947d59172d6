# SPDX-License-Identifier: Apache-2.0
"""Give each rank of an axis a slice of a tensor: the verb of Ulysses (Jacobs et al. 2023).

    rank 0   a0 a1           rank 0   a0 b0
    rank 1   b0 b1     ->    rank 1   a1 b1

It stands here for every transport, beside the verbs of mpu/comm/collectives.py, as only attention
under context parallelism uses it.
"""

from functools import singledispatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpu.comm.collectives import ProcessGroupTransport, to_wire
from mpu.comm.meta import MetaTransport
from mpu.comm.shared_memory import SharedMemoryTransport
from mpu.comm.symmetric import copy
from mpu.comm.transport import DONE, Axis, Handle, Label, Transport
from mpu.comm.workspace import Turn

VERB = "all_to_all"


def all_to_all(
    x: Tensor, axis: Axis, async_op: bool = False, label: Label | None = None
) -> tuple[Tensor, Handle]:
    """Send slice i of dim 0 to the axis' rank i: [t*n, ...] -> [t*n, ...], from ranks in order."""
    if axis.size == 1:
        return x, DONE
    assert x.shape[0] % axis.size == 0, "dim 0 must divide by the axis"
    return _exchanged(axis.carrier, x, axis, async_op, label)


@singledispatch
def _exchanged(
    transport: Transport, x: Tensor, axis: Axis, async_op: bool, label: Label | None
) -> tuple[Tensor, Handle]:
    raise TypeError(f"{type(transport).__name__} has no all-to-all")


@_exchanged.register
def _by_group(
    transport: ProcessGroupTransport, x: Tensor, axis: Axis, async_op: bool, label: Label | None
) -> tuple[Tensor, Handle]:
    wire = to_wire(x, axis)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arrived = torch.empty_like(wire) if transport.staged else out

    def call() -> Any:
        return dist.all_to_all_single(arrived, wire, group=transport.group, async_op=True)

    def finish() -> None:
        if arrived is not out:
            out.copy_(arrived)

    keep = (wire, arrived)
    return out, axis.start(VERB, x, call, keep, finish, async_op=async_op, label=label)


@_exchanged.register
def _by_shared_memory(
    transport: SharedMemoryTransport, x: Tensor, axis: Axis, async_op: bool, label: Label | None
) -> tuple[Tensor, Handle]:
    """Write the slices for other ranks; copy out those that they wrote for this one."""
    if x.device.type != "cpu":
        return _by_group(transport, x, axis, async_op, label)
    rank, slices = axis.rank, x.detach().unflatten(0, (axis.size, -1))
    out = torch.empty(slices.shape, dtype=x.dtype)

    def write(turn: Turn) -> None:
        written = turn.part(rank, tuple(slices.shape), x.dtype)
        for owner in axis.following:
            copy(written[owner], slices[owner])
            turn.signal(owner)
        turn.signal(rank)

    def read(turn: Turn) -> None:
        parts = turn.whole((axis.size, *slices.shape), x.dtype)[:, rank]
        for source in axis.following:
            copy(out[source], parts[source])
        out[rank] = slices[rank]

    handle = transport.begin(VERB, axis, x, write, read, async_op=async_op, label=label)
    return out.flatten(0, 1), handle


@_exchanged.register
def _of_shapes(
    transport: MetaTransport, x: Tensor, axis: Axis, async_op: bool, label: Label | None
) -> tuple[Tensor, Handle]:
    assert x.is_meta
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, axis.start(VERB, x, lambda: None, (), None, async_op=async_op, label=label)
