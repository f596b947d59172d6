# SPDX-License-Identifier: Apache-2.0
"""Save while training goes on: copy what this rank will write, then write the copy in a thread.

The copy is all that a step waits for. It goes to memory that is taken and touched once, at the
start, so that no save finds the host without it or waits for its pages. The thread does what a save
in the foreground does, over a process group of its own: collectives of two threads on one group
would meet in another order on another rank.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from training.checkpoint.pieces import NamedPiece, share

ALIGN = 64  # bytes


class Staging:
    """Host memory for what this rank writes of `pieces`, page-locked where they lie on a GPU."""

    def __init__(self, pieces: Sequence[NamedPiece]) -> None:
        mine = share(pieces)
        pin = any(piece.tensor.is_cuda for piece in mine)
        self._memory = torch.zeros(
            sum(_room(piece) for piece in mine), dtype=torch.uint8, pin_memory=pin
        )

    @torch.no_grad()
    def copy(self, pieces: Sequence[NamedPiece]) -> list[NamedPiece]:
        """Return this rank's share of the pieces with their values of now, nobody else's to write.

        The pieces must be those the memory was made for, as they are in every step of a run.
        """
        copies, at = [], 0
        for piece in share(pieces):
            data = self._memory[at : at + piece.nbytes].view(piece.tensor.dtype).view(piece.sizes)
            data.copy_(piece.data(), non_blocking=True)
            copies.append(replace(piece, tensor=data, holders=(), fetch=None))
            at += _room(piece)
        if self._memory.is_pinned():
            torch.cuda.current_stream().synchronize()
        return copies


def _room(piece: NamedPiece) -> int:
    return -(-piece.nbytes // ALIGN) * ALIGN


class Background:
    """Do one thing at a time in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "save")
        self._future: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return self._future is not None and not self._future.done()

    def start(self, work: Callable[[], None]) -> None:
        """Begin with `work`; what was begun before must have been waited for."""
        assert self._future is None
        self._future = self._pool.submit(work)

    def wait(self) -> None:
        """Wait for its end and raise what it raised, once."""
        future, self._future = self._future, None
        if future is not None:
            future.result()

    def poll(self) -> None:
        """Raise what it raised, if it is over; never wait."""
        if self._future is not None and self._future.done():
            self.wait()
