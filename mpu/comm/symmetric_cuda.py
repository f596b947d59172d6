# SPDX-License-Identifier: Apache-2.0
"""Memory that the GPUs of an axis write to each other, for the kernels of mpu/kernels.

    in the memory of every rank:   flags | slot 0 | slot 1
    a slot:                        a piece from rank 0 | a piece from rank 1 | ...

As on the CPU (mpu/comm/workspace.py) there are two slots, used in turn, and flags are never reset.
Unlike on the CPU, a rank writes into the reader's memory, so that data crosses the link once,
during a matmul. torch's symmetric memory allocates the memory and maps it in all processes; the
flags are our own. All waits are on the GPU, in the order of the current stream, which must be the
same for all epochs. It needs triton.

Each slot has its own flags and its own epoch, the count of its uses:

    begin    wait until all ranks have closed the slot's epoch e, then count: epoch e + 1
    ...      write pieces, raise flags to e + 1, wait for flags
    close    raise this rank's flag to note that it has closed e + 1

The epoch is in device memory and a kernel increments it, so a CUDA graph may contain any number of
uses and be replayed. The host's own count only selects the slot of each use, and is asserted on.
"""

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from mpu.comm.collectives import ProcessGroupTransport, gather_bytes, group_of
from mpu.comm.symmetric import Unavailable
from mpu.comm.transport import Axis, CommunicationError
from mpu.comm.workspace import SLOTS
from mpu.kernels.signals import Exchange, raise_flags, wait_flags
from mpu.kernels.tickets import TICKETS
from mpu.torch_private import TorchLacks, symmetric_memory

LINE = 64  # bytes of a flag
CHUNKS = 64  # flags from each rank to each rank
POLLS = 1_000_000  # polls of a flag that take a GPU about a second
SMS_LEFT = 16  # for NCCL's kernels, about one program on each of 16 SMs, if other axes communicate


class CudaWorkspace:
    """The memory that the kernels of one axis share; it grows to the largest exchange.

    sms_left: SMs that our kernels leave to the kernels of other streams, at least 1, which
    `CudaEpoch.send` needs for its flags. All ranks make and use the workspace in the same order.
    Raises Unavailable, on all ranks, where the GPUs cannot access each other's memory.
    """

    def __init__(
        self, axis: Axis, device: torch.device, timeout: timedelta, sms_left: int = SMS_LEFT
    ) -> None:
        assert sms_left >= 1
        self.axis, self.device, self.sms_left = axis, device, sms_left
        self.patience = min(int(timeout.total_seconds() * POLLS), 2**31 - 1)
        self.error = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.counters = torch.zeros(axis.size * CHUNKS, dtype=torch.int32, device=device)
        self.tickets = torch.zeros(TICKETS, dtype=torch.int32, device=device)
        self.copies = torch.cuda.Stream(device, priority=-1)
        self._allocate(1 << 20)

    def _allocate(self, slot_bytes: int) -> None:
        self.memory = _Memory(self.axis, self.device, slot_bytes)
        self.epoch = 0
        self._open: set[int] = set()

    def begin(self, piece_bytes: int) -> "CudaEpoch":
        """Open the next epoch, in which every rank sends every rank up to `piece_bytes`.

        An epoch that is open while the slots grow keeps its old memory.
        """
        self.check()
        piece = -(-piece_bytes // 16) * 16
        if piece * self.axis.size > self.memory.slot_bytes:
            torch.cuda.synchronize(self.device)
            gather_bytes(b"", self.axis, self.device)  # all pieces of open epochs have arrived
            self._allocate(-(-piece * self.axis.size // (1 << 24)) * (1 << 24))
        self.epoch += 1
        assert self.epoch - SLOTS not in self._open, "the epoch before the last is not closed"
        self._open.add(self.epoch)
        slot = self.memory.slots[self.epoch % SLOTS]
        wait_flags(slot.closed, slot.epoch, self.patience, self.error, step=1)
        return CudaEpoch(self, self.epoch, slot, piece)

    def close(self, epoch: "CudaEpoch") -> None:
        """Notify all ranks, in the stream's order, that this one no longer reads the slot."""
        if epoch.memory is self.memory:  # else no rank writes there any more
            self._open.discard(epoch.number)
            raise_flags(epoch.slot.closes, epoch.slot.epoch)

    def check(self) -> None:
        """Raise CommunicationError if a wait on the GPU has timed out."""
        if late := int(self.error[0]):
            raise CommunicationError(
                f"rank {self.axis.ranks[late - 1]} did not raise its flag in time"
            )


@dataclass(frozen=True)
class _Slot:
    """The addresses of a slot's flags, for the kernels, and its epoch."""

    start: int  # offset of its first piece in the memory, in bytes
    epoch: Tensor  # int32, one element: the number of uses begun
    arrived: Tensor  # flags of chunk 0 that each rank raises for this one
    raises: Tensor  # flags of chunk 0 that this rank raises for each
    closed: Tensor  # flags that each rank raises, on this one, when it has closed the slot
    closes: Tensor  # flags that this rank raises, on each, when it has closed the slot


class _Memory:
    """SLOTS slots of slot_bytes in every rank's memory, and their flags. Collective."""

    def __init__(self, axis: Axis, device: torch.device, slot_bytes: int) -> None:
        self.axis, self.device, self.slot_bytes = axis, device, slot_bytes
        me, size = axis.rank, axis.size
        flags, closed = CHUNKS * LINE, size * CHUNKS * LINE
        per_slot = closed + size * LINE
        self.control = control = SLOTS * per_slot  # bytes of flags
        nbytes, offset, why = control + SLOTS * slot_bytes, 0, ""
        try:
            memory = symmetric_memory()
            self.own = memory.empty(nbytes, dtype=torch.uint8, device=device)
            handle = memory.rendezvous(self.own, group_of(axis))
            offset = self.own.data_ptr() - handle.buffer_ptrs[me]
        except TorchLacks as error:
            why = str(error)
        except RuntimeError as error:
            why = f"the GPUs cannot share memory: {error}"
        every = gather_bytes(json.dumps([offset, why]).encode(), axis, device)
        answers = [json.loads(text) for text in every]
        if why := next((text for _, text in answers if text), ""):
            raise Unavailable(why)
        # a tensor may begin inside the shared block, at another offset on each rank
        assert offset >= 0, "this rank's memory begins before the shared allocation"
        offsets = [at for at, _ in answers]
        self._handle = handle  # keeps the mapping alive
        self.all = [handle.get_buffer(r, (nbytes,), torch.uint8, offsets[r]) for r in range(size)]
        self.bases = [pointer + at for pointer, at in zip(handle.buffer_ptrs, offsets, strict=True)]
        assert [view.data_ptr() for view in self.all] == self.bases and offset % 16 == 0
        self.own[:control].zero_()
        epochs = torch.zeros(SLOTS, 4, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        gather_bytes(b"", axis, device)  # no rank writes before all flags are zero
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.slots = []
        for s in range(SLOTS):
            mine, theirs = self.bases[me] + s * per_slot, [b + s * per_slot for b in self.bases]
            slot = _Slot(
                start=control + s * slot_bytes,
                epoch=epochs[s, :1],
                arrived=self._table([mine + r * flags for r in range(size)]),
                raises=self._table([base + me * flags for base in theirs]),
                closed=self._table([mine + closed + r * LINE for r in range(size)]),
                closes=self._table([base + closed + me * LINE for base in theirs]),
            )
            self.slots.append(slot)

    def _table(self, addresses: list[int]) -> Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def tables(self, slot: _Slot, piece: int) -> tuple[Tensor, Tensor]:
        """Return the addresses from which this rank reads each rank's piece, and those at which it
        writes its own piece for each rank.
        """
        if (slot.start, piece) not in self._tables:
            me, ranks = self.axis.rank, range(self.axis.size)
            here = [self.bases[me] + slot.start + r * piece for r in ranks]
            there = [base + slot.start + me * piece for base in self.bases]
            self._tables[slot.start, piece] = self._table(here), self._table(there)
        return self._tables[slot.start, piece]


class CudaEpoch:
    """One use of a slot."""

    def __init__(self, workspace: CudaWorkspace, number: int, slot: _Slot, piece: int) -> None:
        self.workspace, self.memory = workspace, workspace.memory
        self.number, self.slot, self.piece = number, slot, piece

    def exchange(self, chunk_rows: int) -> Exchange:
        """Return the kernels' arguments. chunk_rows: rows of one flag (see chunk_rows in
        mpu/overlap/cuda.py); the rows of a rank may form at most CHUNKS chunks.
        """
        space, slot = self.workspace, self.slot
        inbox, outbox = self.memory.tables(slot, self.piece)
        return Exchange(
            rank=space.axis.rank,
            world=space.axis.size,
            epoch=slot.epoch,
            chunk_rows=chunk_rows,
            inbox=inbox,
            arrived=slot.arrived,
            outbox=outbox,
            raises=slot.raises,
            flag_stride=LINE,
            counters=space.counters,
            tickets=space.tickets,
            error=space.error,
            patience=space.patience,
            sms_left=space.sms_left,
        )

    def _piece(self, holder: int, writer: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        start = self.slot.start + writer * self.piece
        n = shape.numel() * dtype.itemsize
        assert n <= self.piece
        return self.memory.all[holder][start : start + n].view(dtype).view(shape)

    def part(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of the piece that `rank` wrote for this rank."""
        return self._piece(self.workspace.axis.rank, rank, torch.Size(shape), dtype)

    def send(self, x: Tensor) -> None:
        """Copy x into every rank's memory and raise the flags of chunk 0, on a separate stream.

        The copy engines do the copies, so that the only SM used is that of the short kernel for the
        flags. Keep x until `arrive` is called.
        """
        axis, side = self.workspace.axis, self.workspace.copies
        side.wait_stream(torch.cuda.current_stream(self.workspace.device))
        with torch.cuda.stream(side):
            for step in range(1, axis.size + 1):  # the rank before first, this one last
                holder = (axis.rank - step) % axis.size
                self._piece(holder, axis.rank, x.shape, x.dtype).copy_(x)
            raise_flags(self.slot.raises, self.slot.epoch)

    def arrive(self) -> None:
        """Make the current stream wait for the data that all ranks `send` in this epoch."""
        space = self.workspace
        torch.cuda.current_stream(space.device).wait_stream(space.copies)
        wait_flags(self.slot.arrived, self.slot.epoch, space.patience, space.error)

    def gathered(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the pieces of all ranks for this one, [n, ...] each, concatenated along dim 0."""
        size, rank = self.workspace.axis.size, self.workspace.axis.rank
        n = torch.Size(shape).numel() * dtype.itemsize
        if self.piece == n:
            start = self.slot.start
            slot = self.memory.all[rank][start : start + size * n]
            return slot.view(dtype).view(size * shape[0], *shape[1:])
        return torch.cat([self.part(r, shape, dtype) for r in range(size)])

    def close(self) -> None:
        """Release the slot: this rank no longer reads it."""
        self.workspace.close(self)


class CudaSymmetricTransport(ProcessGroupTransport):
    """Runs collectives on the process group; overlap kernels write through its workspace."""

    symmetric = True

    def __init__(self, group: Any, workspace: CudaWorkspace, staged: bool = False) -> None:
        super().__init__(group, staged)
        self.workspace = workspace
