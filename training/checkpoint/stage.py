# SPDX-License-Identifier: Apache-2.0
"""Save while training continues: copy this rank's data, then write the copy in a thread.

A step waits only for the copy. Its memory is allocated and touched once, at the start, so that no
save runs out of host memory or waits for page faults. The thread does the same as a save in the
foreground, over its own process group: on a shared group, two threads would start collectives in
different orders on different ranks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from mpu.host_memory import ALIGN, HostMemory
from training.checkpoint.pieces import NamedPiece, share


class Staging:
    """Host memory for the `pieces` that this rank writes, page-locked if they are on a GPU."""

    def __init__(self, pieces: Sequence[NamedPiece]) -> None:
        mine = share(pieces)
        on_gpu = any(piece.tensor.device.type == "cuda" for piece in mine)
        self._host = HostMemory(on_gpu, sum(piece.nbytes + ALIGN for piece in mine))
        self._memory = [self._host.zeros((piece.nbytes,), torch.uint8) for piece in mine]

    @torch.no_grad()
    def copy(self, pieces: Sequence[NamedPiece]) -> list[NamedPiece]:
        """Return copies of the pieces that this rank writes, with this rank as the only holder.

        The pieces must be those for which the memory was made, as in every step of a run.
        """
        copies = []
        for piece, memory in zip(share(pieces), self._memory, strict=True):
            data = memory.view(piece.tensor.dtype).view(piece.sizes)
            data.copy_(piece.data(), non_blocking=True)
            copies.append(replace(piece, tensor=data, holders=(), fetch=None))
        if self._host.locked:
            torch.cuda.current_stream().synchronize()
        return copies


class Background:
    """Run one task at a time in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "save")
        self._future: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` after earlier work has ended; if that failed, `work` is not run."""
        before = self._future

        def after() -> None:
            if before is not None:
                before.result()
            work()

        self._future = self._pool.submit(after)

    def wait(self) -> None:
        """Wait for the work to end and raise its error, once."""
        future, self._future = self._future, None
        if future is not None:
            future.result()

    def poll(self) -> None:
        """Raise the error of the work if it has ended; never wait."""
        if self._future is not None and self._future.done():
            self.wait()
