# SPDX-License-Identifier: Apache-2.0
"""Two slots of shared memory for the collectives of an axis, used alternately.

epoch e       rank 0                                rank 1
              begin: slot e % 2, once all ranks have closed epoch e - 2
              write part 0 | signal                 write part 1 | signal
              wait for 1   | read part 1 in place   wait for 0   | read part 0 in place
              close                                 close
"""

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial

import torch
from torch import Tensor

from mpu.comm.symmetric import SymmetricBuffer, Unavailable, copy
from mpu.comm.transport import Axis, CommunicationError

SLOTS = 2  # one is written while the other is still read
VIEWS = 256  # capacity of the cache of views of the memory


class Workspace:
    """The shared memory of one axis' collectives: SLOTS slots, which grow to the largest message.

    axis: its transport must be a process group, over which the ranks agree on the memory. All ranks
    use the workspace in the same order, as they use a process group. ranks: number of ranks on this
    host, over all axes (0: unknown).
    """

    def __init__(self, axis: Axis, timeout: timedelta, ranks: int = 0) -> None:
        self.axis, self.timeout, self.ranks = axis, timeout, ranks
        self.epoch = 0
        self._open: dict[int, Epoch] = {}
        self._allocate(1 << 16)

    def _allocate(self, slot_bytes: int) -> None:
        self.buffer = SymmetricBuffer(self.axis, SLOTS * slot_bytes, self.timeout, self.ranks)
        self.slot_bytes = slot_bytes
        # cached: each step uses the same few views, and a view takes three operations to make
        self.view = lru_cache(VIEWS)(partial(_view, self.buffer.data))

    def begin(self, part_bytes: int) -> "Epoch":
        """Wait until the next epoch's slot is free; open it with one part per rank."""
        self.buffer.refuse_fork()  # a forked child must not touch the process group, either
        if part_bytes * self.axis.size > self.slot_bytes:
            self._grow(part_bytes * self.axis.size)
        if late := self._open.get(self.epoch + 1 - SLOTS):
            late.complete()
        self.epoch += 1
        assert self.epoch - SLOTS not in self._open, "complete() of an epoch did not close it"
        self.buffer.wait_closed(self.epoch - SLOTS, "a wait for a free slot")
        epoch = self._open[self.epoch] = Epoch(self, self.epoch, part_bytes)
        return epoch

    def _grow(self, nbytes: int) -> None:
        """Map larger slots, on all ranks. An open epoch keeps its old slot until it is closed."""
        step = 1 << 20 if nbytes < 1 << 24 else 1 << 24
        try:
            self._allocate(-(-nbytes // step) * step)
        except Unavailable as error:
            raise CommunicationError(f"{error}; --no-shared-memory avoids it") from error
        self._open.clear()
        self.buffer.close(self.epoch)
        self.buffer.signal_all(2 * self.epoch + 1)  # not from 0: compared by difference
        self.buffer.barrier()

    def close(self, epoch: "Epoch") -> None:
        """Release the epoch's slot, once no older epoch is open."""
        self._open.pop(epoch.epoch, None)
        self.buffer.close(min(self._open, default=self.epoch + 1) - 1)


def _view(data: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return data[start : start + nbytes].view(dtype).view(shape)


class Epoch:
    """One use of a slot: a part for each rank, and flags in two phases (MPI's access epoch)."""

    def __init__(self, workspace: Workspace, epoch: int, part_bytes: int) -> None:
        self.workspace, self.buffer = workspace, workspace.buffer
        self.epoch, self.part_bytes, self.phase = epoch, part_bytes, 0
        self.complete: Callable[[], None] = self.close  # called by the epoch that reuses the slot
        self._start, self._view = epoch % SLOTS * workspace.slot_bytes, workspace.view

    def part(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> Tensor:
        """Return a view of the part that `rank` writes, starting at `offset` bytes."""
        view = self._view(self._start + rank * self.part_bytes + offset, shape, dtype)
        assert offset + view.nbytes <= self.part_bytes
        return view

    def gathered(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of all parts, concatenated along dim 0."""
        return self._view(self._start, shape, dtype)

    def put(self, x: Tensor) -> None:
        """Write x as this rank's part and signal all ranks."""
        copy(self.part(self.buffer.rank, tuple(x.shape), x.dtype), x)
        self.signal_all()

    def signal(self, dst: int) -> None:
        """Signal to rank dst that the data written for it is ready."""
        self.buffer.signal(dst, 2 * self.epoch + self.phase)

    def signal_all(self) -> None:
        """Signal to all ranks that the data written is ready."""
        self.buffer.signal_all(2 * self.epoch + self.phase)

    def wait(self) -> None:
        """Wait until every rank has signalled this phase."""
        self.buffer.wait_all(2 * self.epoch + self.phase, "shared memory")

    def is_completed(self) -> bool:
        """Return whether every rank has signalled this phase."""
        return self.buffer.ready(2 * self.epoch + self.phase)

    def close(self) -> None:
        """Release the slot: this rank no longer reads it."""
        self.workspace.close(self)
