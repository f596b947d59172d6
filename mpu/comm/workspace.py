# SPDX-License-Identifier: Apache-2.0
"""Give the collectives of an axis two slots of shared memory, used in turn.

    epoch e       rank 0                                rank 1
                  begin: slot e % 2, when all have closed epoch e - 2
                  write part 0 | signal                 write part 1 | signal
                  wait for 1   | read part 1 in place   wait for 0   | read part 0 in place
                  close                                 close

`share` gives an axis its workspace where its ranks are on one host, and says why where it cannot:
then collectives go through the process group.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

from mpu.comm.handle import CommunicationError
from mpu.comm.symmetric import SymmetricBuffer, Unavailable, copy
from mpu.grid import Axis, Grid

SLOTS = 2  # one is written while the last one is still read


class Workspace:
    """What the collectives of one axis share: SLOTS slots, which grow to the largest message.

    All ranks use it in one order, as they do their process group.
    """

    def __init__(self, axis: Axis, timeout: timedelta) -> None:
        self.axis, self.timeout = replace(axis, memory=None), timeout
        self.epoch = 0
        self._open: dict[int, Turn] = {}
        self._allocate(1 << 16)

    def _allocate(self, slot_bytes: int) -> None:
        self.buffer = SymmetricBuffer(self.axis, SLOTS * slot_bytes, self.timeout)
        self.slot_bytes = slot_bytes

    def begin(self, part_bytes: int) -> "Turn":
        """Open the next epoch, of one part a rank, when its slot is free."""
        self.buffer.refuse_fork()  # a forked child must not touch the process group, either
        if part_bytes * self.axis.size > self.slot_bytes:
            self._grow(part_bytes * self.axis.size)
        if late := self._open.get(self.epoch + 1 - SLOTS):
            late.complete()
        self.epoch += 1
        assert self.epoch - SLOTS not in self._open, "a turn was not closed by its own completion"
        self.buffer.wait_closed(self.epoch - SLOTS, "the turn before the last")
        turn = self._open[self.epoch] = Turn(self, self.epoch, part_bytes)
        return turn

    def _grow(self, nbytes: int) -> None:
        """Let all ranks map larger slots. What is open stays in its own until it is closed."""
        step = 1 << 20 if nbytes < 1 << 24 else 1 << 24
        try:
            self._allocate(-(-nbytes // step) * step)
        except Unavailable as error:
            raise CommunicationError(f"{error}; --no-shared-memory does without") from error
        self._open.clear()
        self.buffer.close(self.epoch)
        self.buffer.signal_all(2 * self.epoch + 1)  # numbers are compared by their difference
        self.buffer.barrier()

    def close(self, turn: "Turn") -> None:
        """Let the slot go, as far as no older turn is open."""
        self._open.pop(turn.epoch, None)
        self.buffer.close(min(self._open, default=self.epoch + 1) - 1)


class Turn:
    """One epoch of a workspace: a part for each rank, and its flags, in two phases."""

    copy = staticmethod(copy)

    def __init__(self, workspace: Workspace, epoch: int, part_bytes: int) -> None:
        self.workspace, self.buffer = workspace, workspace.buffer
        self.epoch, self.part_bytes, self.phase = epoch, part_bytes, 0
        self.complete: Callable[[], None] = self.close  # what a turn that needs the slot calls
        start = epoch % SLOTS * workspace.slot_bytes
        self.slot = self.buffer.data[start : start + part_bytes * workspace.axis.size]

    def part(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return what `rank` writes (or wrote), in place."""
        n = torch.Size(shape).numel() * dtype.itemsize
        assert n <= self.part_bytes
        start = rank * self.part_bytes
        return self.slot[start : start + n].view(dtype).view(shape)

    def whole(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return all parts, in place, one behind the other along dim 0."""
        return self.slot.view(dtype).view(shape)

    def put(self, x: Tensor) -> None:
        """Write x as this rank's part, and signal."""
        copy(self.part(self.buffer.rank, tuple(x.shape), x.dtype), x)
        self.signal_all()

    def signal(self, dst: int) -> None:
        """Say that what was written for rank dst is ready."""
        self.buffer.signal(dst, 2 * self.epoch + self.phase)

    def signal_all(self) -> None:
        """Say that what was written is ready for everyone."""
        self.buffer.signal_all(2 * self.epoch + self.phase)

    def wait(self) -> None:
        """Wait for what every rank writes."""
        self.buffer.wait_all(2 * self.epoch + self.phase, "shared memory")

    def is_completed(self) -> bool:
        """Say whether everything has been written."""
        return self.buffer.ready(2 * self.epoch + self.phase)

    def close(self) -> None:
        """Read nothing any more."""
        self.workspace.close(self)


def share_gpus(grid: Grid, device: torch.device, timeout: timedelta) -> list[str]:
    """Give the overlap kernels of the tp axis what they write through; return a line that says so,
    or why not. Collective over tp.
    """
    if grid.tp.size == 1:
        return []
    try:
        from mpu.comm.symmetric_cuda import CudaWorkspace

        grid.tp = replace(grid.tp, kernels=CudaWorkspace(grid.tp, device, timeout))
    except (ImportError, Unavailable) as error:
        grid.tp = replace(grid.tp, no_memory=str(error))
    said = "symmetric memory" if grid.tp.symmetric else f"not to be had; {grid.tp.no_memory}"
    return [f"overlap kernels of tp ({grid.tp.size} ranks): {said}"]


def share(grid: Grid, timeout: timedelta) -> list[str]:
    """Give each axis that carries sums or gathers a workspace; return lines that say which, or why
    not.

    Collective: every rank of the world calls it. Axes over the same ranks share one.
    """
    lines, spaces = [], dict[tuple[int, ...], Workspace | str]()
    for name in ("tp", "data", "shard", "replica"):
        axis: Axis = getattr(grid, name)
        if axis.size == 1:
            continue
        if axis.ranks not in spaces:
            try:
                spaces[axis.ranks] = Workspace(axis, timeout)
            except Unavailable as error:
                spaces[axis.ranks] = str(error)
            space = spaces[axis.ranks]
            said = "shared memory" if isinstance(space, Workspace) else f"{grid.backend}; {space}"
            lines.append(f"collectives of {name} ({axis.size} ranks): {said}")
        if isinstance(space := spaces[axis.ranks], Workspace):
            setattr(grid, name, replace(axis, memory=space))
        else:
            setattr(grid, name, replace(axis, no_memory=space))
    return lines
