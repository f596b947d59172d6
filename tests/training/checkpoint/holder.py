# SPDX-License-Identifier: Apache-2.0
"""A process that holds a directory's lock, as a run that writes there does."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

from training.checkpoint.lock import DirectoryLock


def _hold(root: Path, pipe: Connection) -> None:
    lock = DirectoryLock(root)
    pipe.send("held")
    pipe.recv()
    lock.close()


class Holder:
    """Holds the lock until it is freed or killed."""

    def __init__(self, root: Path) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_hold, args=(root, theirs), daemon=True)
        self.process.start()
        assert self.pipe.recv() == "held"
        self.pid = self.process.pid

    def free(self) -> None:
        """Let it close the lock and end."""
        self.pipe.send("")
        self.process.join(60)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
