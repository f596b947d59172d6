# SPDX-License-Identifier: Apache-2.0
"""Lock a directory, so that one run at a time writes to it.

Two runs that save to one directory would delete each other's unfinished saves and mix their steps.
A POSIX record lock on the file `lock` keeps the second run out. The kernel releases it when the
process dies, for whatever reason, and it works over NFS. On a file system without locks a warning
is printed, and the run continues without one.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from training.checkpoint.errors import SaveError
from training.files.untrusted import parse_json

NAME = "lock"
WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
LOCKED = (errno.EACCES, errno.EAGAIN)
PATIENCE = 120.0  # seconds: a requeued job may begin while its old ranks still save


class DirectoryLock:
    """An exclusive lock on `root`, held until close() or the end of the process.

    A process may have only one per directory: the kernel drops all of a process's locks on a file
    when any of its handles closes. Waits up to `patience` seconds for another process, then raises
    SaveError naming it. Raises OSError if `root` cannot be written.
    """

    def __init__(
        self, root: Path, note: Callable[[str], None] = print, patience: float = PATIENCE
    ) -> None:
        self._path = root / NAME
        self._open()
        until, noted = time.monotonic() + patience, False
        while (failed := self._try()) in LOCKED or (failed is None and self._removed()):
            if failed is None:  # its holder undid it: another run may lock the file made since
                self.close()
                self._open()
                continue
            who = f"{root} is being written by another run: {_holder(os.pread(self._fd, 1000, 0))}"
            if time.monotonic() > until:
                self.close()
                raise SaveError(who)
            if not noted:
                note(f"{who}; waiting for it to end")
            noted = True
            time.sleep(min(1.0, patience / 2))
        if failed is not None and failed not in WITHOUT:
            self.close()
            raise OSError(failed, os.strerror(failed), str(root / NAME))
        if failed is not None:
            note(f"{root}: the file system does not support locks; keep other runs away from it")
            return
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.ctime()}
        self._write(json.dumps(about).encode())

    def _open(self) -> None:
        """Open the lock's file, or make it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
        self._new = not self._path.exists()
        self._fd = os.open(self._path, flags, 0o600)
        plain = stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._before = os.pread(self._fd, 1000, 0) if plain else b""
        if not _is_lock(self._before):
            self.close()
            raise SaveError(f"{self._path} is not the lock of a run, so it is not overwritten")

    def _removed(self) -> bool:
        """Return whether the open file is no longer the one at its path."""
        with suppress(FileNotFoundError):
            return not os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        return True

    def _try(self) -> int | None:
        """Try to take the lock; return None, or the errno of the failure."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno
        return None

    def _write(self, data: bytes) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)

    def close(self, undo: bool = False) -> None:
        """Release the lock; with `undo`, leave the lock's file as it was, or remove a new one."""
        if undo and self._fd >= 0 and self._new:
            self._path.unlink(missing_ok=True)
        elif undo and self._fd >= 0:
            self._write(self._before)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _is_lock(data: bytes) -> bool:
    """Return whether a file is empty, or names the holder of a lock."""
    with suppress(ValueError):
        holder = parse_json(data, NAME) if data else {"pid": 0}
        return isinstance(holder, dict) and "pid" in holder
    return False


def _holder(data: bytes) -> str:
    """Return the holder of a lock according to its file."""
    try:
        who = parse_json(data, NAME)
        return f"process {who['pid']} on {who['host']}, since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "its file `lock` does not say which"
