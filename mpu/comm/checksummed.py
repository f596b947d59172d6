# SPDX-License-Identifier: Apache-2.0
"""Let each message between CPU ranks carry its XXH3 checksum (--checksum-messages).

    sender    bytes | XXH3 of (bytes, sender, receiver's axis, verb)    ->    receiver compares

A rank's part of a collective is a message too: sums are made here, in rank order, from parts that
arrive whole, so every part is compared before it is added. The process group carries them; memory
that ranks share is not used, as its readers take the data in place. Sums have the bits of
SharedMemoryTransport. A message that was damaged anywhere between the two hashes (the sender's
memory, the wire, the receiver's memory) raises DamagedMessage at its receiver.
"""

from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from mpu.comm.collectives import ProcessGroupTransport, sum_of_parts
from mpu.comm.transport import Axis, Handle, Label, Splits

TAIL = 8  # bytes of a checksum
OPS = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}


class DamagedMessage(RuntimeError):
    """A message does not have the checksum that it was sent with; the text says whose it is."""


def _sum_of(data: Tensor, sender: int, axis: Axis, verb: str) -> bytes:
    hashed = xxhash.xxh3_64(data.numpy().data)
    hashed.update(f"{sender} {axis.name} {verb}".encode())
    return hashed.digest()


def seal(x: Tensor, axis: Axis, verb: str) -> Tensor:
    """Return x's bytes and their checksum, as uint8 [n + TAIL]: a copy."""
    data = x.detach().contiguous().view(-1).view(torch.uint8)
    out = torch.empty(data.numel() + TAIL, dtype=torch.uint8)
    out[:-TAIL] = data
    checksum = _sum_of(data, axis.ranks[axis.rank], axis, verb)
    out[-TAIL:] = torch.frombuffer(bytearray(checksum), dtype=torch.uint8)
    return out


def unseal(
    wire: Tensor, into: Tensor, axis: Axis, source: int, verb: str, label: Label | None
) -> None:
    """Copy a message of the axis' rank `source` into a contiguous tensor, if it is whole.

    Raises DamagedMessage naming sender, verb, label and size.
    """
    data, sender = wire[:-TAIL], axis.ranks[source]
    if _sum_of(data, sender, axis, verb) != wire[-TAIL:].numpy().tobytes():
        who = ""
        if label is not None:
            name = label.who if isinstance(label.who, str) else type(label.who).__name__
            who = f", {name}, {label.phase}"
        raise DamagedMessage(
            f"a message was damaged on its way: rank {sender}'s {data.numel()} bytes in {verb} "
            f"over {axis.name} (ranks {list(axis.ranks)}{who}) do not have the checksum they were "
            f"sent with, on rank {axis.ranks[axis.rank]}"
        )
    into.view(-1).view(torch.uint8).copy_(data)


class ChecksummedTransport(ProcessGroupTransport):
    """Carries tensors of CPU ranks by a process group, each part with its checksum."""

    def all_gather(
        self, x: Tensor, axis: Axis, async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Gather sealed parts; open each."""
        shape = (axis.size * x.shape[0], *x.shape[1:])
        out = into if into is not None else x.new_empty(shape)
        parts = out.view(axis.size, *x.shape)
        return out, self._gather("all_gather", x, axis, parts, None, async_op, label=label)

    def all_reduce(
        self, x: Tensor, axis: Axis, async_op: bool, op: Any, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Gather sealed parts; combine them in rank order."""
        parts = x.new_empty((axis.size, *x.shape))

        def combine() -> None:
            if op == dist.ReduceOp.SUM:
                whole = torch.empty_like(parts[0])
                sum_of_parts(parts, whole)
                x.copy_(whole)
            else:
                x.copy_(reduce(OPS[op], parts))

        return x, self._gather("all_reduce", x, axis, parts, combine, async_op, label=label)

    def _gather(
        self,
        verb: str,
        x: Tensor,
        axis: Axis,
        parts: Tensor,
        then: Any,
        async_op: bool,
        *,
        label: Label | None,
    ) -> Handle:
        """Gather every rank's x into `parts` [size, *x.shape], then call then()."""
        wire = seal(x, axis, verb)
        every = torch.empty((axis.size, len(wire)), dtype=torch.uint8)

        def call() -> Any:
            return dist.all_gather(list(every), wire, group=self.group, async_op=True)

        def finish() -> None:
            for rank, row in enumerate(every):
                unseal(row, parts[rank], axis, rank, verb, label)
            if then is not None:
                then()

        keep = (wire, every)
        return axis.start(verb, x, call, keep, finish, async_op=async_op, label=label)

    def reduce_scatter(
        self, x: Tensor, axis: Axis, async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Exchange sealed slices; open each, and add them in rank order."""
        verb, slices = "reduce_scatter", x.detach().unflatten(0, (axis.size, -1))
        own = slices[axis.rank]
        out = torch.empty_like(own, memory_format=torch.contiguous_format) if into is None else into
        wire = torch.stack([seal(part, axis, verb) for part in slices])
        every = torch.empty_like(wire)

        def call() -> Any:
            return dist.all_to_all_single(every, wire, group=self.group, async_op=True)

        def finish() -> None:
            parts = x.new_empty(slices.shape)
            for rank, row in enumerate(every):
                unseal(row, parts[rank], axis, rank, verb, label)
            sum_of_parts(parts, out)

        keep = (wire, every)
        return out, axis.start(verb, x, call, keep, finish, async_op=async_op, label=label)

    def all_to_all(
        self, x: Tensor, axis: Axis, async_op: bool, splits: Splits | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Exchange sealed slices of one size; open each."""
        assert splits is None
        verb, slices = "all_to_all", x.detach().unflatten(0, (axis.size, -1))
        out = torch.empty(slices.shape, dtype=x.dtype)
        wire = torch.stack([seal(part, axis, verb) for part in slices])
        every = torch.empty_like(wire)

        def call() -> Any:
            return dist.all_to_all_single(every, wire, group=self.group, async_op=True)

        def finish() -> None:
            for source, row in enumerate(every):
                unseal(row, out[source], axis, source, verb, label)

        keep = (wire, every)
        handle = axis.start(verb, x, call, keep, finish, async_op=async_op, label=label)
        return out.flatten(0, 1), handle

    def pack(self, x: Tensor, axis: Axis) -> Tensor:
        """Return a message's bytes and checksum."""
        return seal(x, axis, "message")

    def room(self, out: Tensor) -> Tensor:
        """Return memory for a message and its checksum."""
        return torch.empty(out.nbytes + TAIL, dtype=torch.uint8)

    def unpack(
        self, wire: Tensor, out: Tensor, axis: Axis, source: int, label: Label | None
    ) -> None:
        """Compare, then copy the message out."""
        unseal(wire, out, axis, source, "message", label)
