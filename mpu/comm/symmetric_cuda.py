# SPDX-License-Identifier: Apache-2.0
"""Let the GPUs of an axis write into each other's memory, for the kernels of mpu/kernels.

    in the memory of every rank:   flags | slot 0 | slot 1
    a slot:                        a piece from rank 0 | a piece from rank 1 | ...

As on the CPU (mpu/comm/workspace.py) there are two slots, used in turn and counted in epochs, and
flags are never reset. Unlike there a rank writes into the reader's memory, so that data crosses the
link once, while something is multiplied. torch's symmetric memory allocates the memory and maps it
in all processes; the flags are our own. All waits are on the GPU, in the order of the current
stream, which must be the same for all turns. It needs triton.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from mpu.comm.collectives import ProcessGroupTransport, gather_bytes, group_of
from mpu.comm.symmetric import Unavailable
from mpu.comm.transport import Axis, CommunicationError
from mpu.comm.workspace import SLOTS
from mpu.kernels.signals import Exchange, raise_flags, wait_flags

LINE = 64  # bytes of a flag
CHUNKS = 64  # flags that each rank has for each rank
POLLS = 1_000_000  # of a flag, which take a GPU about a second


class CudaWorkspace:
    """What the kernels of one axis share: SLOTS slots, which grow to the largest exchange.

    All ranks make and use it in one order. Raises Unavailable, on all ranks alike, where the GPUs
    do not see each other's memory.
    """

    def __init__(self, axis: Axis, device: torch.device, timeout: timedelta) -> None:
        self.axis, self.device = axis, device
        self.patience = min(int(timeout.total_seconds() * POLLS), 2**31 - 1)
        self.error = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.counters = torch.zeros(axis.size * CHUNKS, dtype=torch.int32, device=device)
        self._allocate(1 << 20)

    def _allocate(self, slot_bytes: int) -> None:
        me, size = self.axis.rank, self.axis.size
        closed = size * CHUNKS * LINE
        self._control = closed + size * LINE
        why = ""
        try:
            nbytes = self._control + SLOTS * slot_bytes
            self._memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
            self._bases = symmetric_memory.rendezvous(self._memory, group_of(self.axis)).buffer_ptrs
        except RuntimeError as error:
            why = f"the GPUs do not see each other's memory: {error}"
        every = gather_bytes(why.encode(), self.axis, self.device)
        if why := next((text.decode() for text in every if text), ""):
            raise Unavailable(why)
        self._memory[: self._control].zero_()
        torch.cuda.synchronize(self.device)
        gather_bytes(b"", self.axis, self.device)  # no rank writes before all flags are zero
        self.slot_bytes, self.epoch = slot_bytes, 0
        self._open: set[int] = set()
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        mine, flags = self._bases[me], CHUNKS * LINE
        self.arrived = self._table([mine + r * flags for r in range(size)])
        self.raises = self._table([base + me * flags for base in self._bases])
        self._closed = self._table([mine + closed + r * LINE for r in range(size)])
        self._close = self._table([base + closed + me * LINE for base in self._bases])

    def _table(self, addresses: list[int]) -> Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def begin(self, piece_bytes: int) -> "CudaTurn":
        """Open the next epoch, in which every rank gives every rank up to `piece_bytes`."""
        self.check()
        piece = -(-piece_bytes // 16) * 16
        if piece * self.axis.size > self.slot_bytes:
            assert not self._open, "a turn is open while the slots must grow"
            torch.cuda.synchronize(self.device)
            gather_bytes(b"", self.axis, self.device)  # no rank writes into the old slots any more
            self._allocate(-(-piece * self.axis.size // (1 << 24)) * (1 << 24))
        self.epoch += 1
        if self.epoch > SLOTS:
            assert self.epoch - SLOTS not in self._open, "the turn before the last is not closed"
            wait_flags(self._closed, self.epoch - SLOTS, self.patience, self.error)
        self._open.add(self.epoch)
        return CudaTurn(self, self.epoch, piece)

    def close(self, turn: "CudaTurn") -> None:
        """Note for all ranks, in the stream's order, that this one no longer reads the slot."""
        self._open.discard(turn.epoch)
        raise_flags(self._close, min(self._open, default=self.epoch + 1) - 1)

    def tables(self, epoch: int, piece: int) -> tuple[Tensor, Tensor]:
        """Return the addresses where this rank reads each rank's piece, and where it writes."""
        slot = epoch % SLOTS
        if (slot, piece) not in self._tables:
            start, me = self._control + slot * self.slot_bytes, self.axis.rank
            here = [self._bases[me] + start + r * piece for r in range(self.axis.size)]
            there = [base + start + me * piece for base in self._bases]
            self._tables[slot, piece] = self._table(here), self._table(there)
        return self._tables[slot, piece]

    def slot_of(self, epoch: int) -> Tensor:
        """Return the bytes of a slot of this rank's memory."""
        start = self._control + epoch % SLOTS * self.slot_bytes
        return self._memory[start : start + self.slot_bytes]

    def memory_of(self, epoch: int, piece: int, rank: int) -> Tensor:
        """Return the bytes of this rank's memory in which `rank`'s piece arrives."""
        return self.slot_of(epoch)[rank * piece : (rank + 1) * piece]

    def check(self) -> None:
        """Raise CommunicationError if a wait on the GPU has run out."""
        if late := int(self.error[0]):
            raise CommunicationError(
                f"rank {self.axis.ranks[late - 1]} did not raise its flag in time"
            )


class CudaTurn:
    """One epoch of a workspace."""

    def __init__(self, workspace: CudaWorkspace, epoch: int, piece: int) -> None:
        self.workspace, self.epoch, self.piece = workspace, epoch, piece

    def exchange(self, chunk_rows: int) -> Exchange:
        """Return what the kernels need. chunk_rows: rows of one flag (see chunk_rows in
        mpu/comm/overlap_cuda.py); a rank's rows may make CHUNKS chunks at most.
        """
        space = self.workspace
        inbox, outbox = space.tables(self.epoch, self.piece)
        return Exchange(
            rank=space.axis.rank,
            world=space.axis.size,
            epoch=self.epoch,
            chunk_rows=chunk_rows,
            inbox=inbox,
            arrived=space.arrived,
            outbox=outbox,
            raises=space.raises,
            flag_stride=LINE,
            counters=space.counters,
            error=space.error,
            patience=space.patience,
        )

    def part(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of what `rank` wrote for this rank."""
        n = torch.Size(shape).numel() * dtype.itemsize
        piece = self.workspace.memory_of(self.epoch, self.piece, rank)
        return piece[:n].view(dtype).view(shape)

    def whole(self, x: Tensor) -> Tensor:
        """Return what all ranks wrote for this one, along dim 0, with x as this rank's part."""
        rank, size, shape = self.workspace.axis.rank, self.workspace.axis.size, tuple(x.shape)
        self.part(rank, shape, x.dtype).copy_(x)
        if self.piece == x.nbytes:
            slot = self.workspace.slot_of(self.epoch)[: size * self.piece]
            return slot.view(x.dtype).view(size * shape[0], *shape[1:])
        return torch.cat([self.part(r, shape, x.dtype) for r in range(size)])

    def close(self) -> None:
        """Let the slot go: this rank no longer reads it."""
        self.workspace.close(self)


class CudaSymmetricTransport(ProcessGroupTransport):
    """Carries collectives by the process group; overlap kernels write through its workspace."""

    symmetric = True

    def __init__(self, group: Any, workspace: CudaWorkspace, staged: bool = False) -> None:
        super().__init__(group, staged)
        self.workspace = workspace
