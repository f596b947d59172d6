# SPDX-License-Identifier: Apache-2.0
"""Cache sample indices and digests on disk, so that each node computes each of them once.

The processes of a node synchronize by a file lock, so they need neither a shared file system nor a
process group. An entry is one .npy of int32 whose last eight words are the SHA-256 of the rest and
of the facts it was built from; an entry that does not match its SHA-256 is built again.

Others may write to the directory. So no link is followed, no existing file is truncated, and an
entry is trusted only if it belongs to this user, to root, to the owner of the data, or to a user
of --trust-owner.
"""

import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from training.data.files import replacing
from training.faults.activity import Activity
from training.files.untrusted import open_plain, trusted

WORDS = 8  # of int32 in a SHA-256
READ_LIMIT = 256 << 20  # bytes; a larger entry is mapped instead of read


class IndexCache:
    """Read int32 arrays from a directory, or build them there under a lock.

    A directory that cannot be used is reported once by `report`; arrays are then built in memory.
    `patience`: for how many seconds another process may hold the lock of an entry. `owner`: a user
    whose entries are trusted in addition. `activity`: reports slow operations.
    """

    def __init__(
        self,
        directory: str,
        report: Callable[[str], None] = print,
        patience: float = 600.0,
        owner: int = 0,
        activity: Activity | None = None,
    ) -> None:
        self.directory = directory
        self.report, self.activity = report, activity or Activity(tell=report)
        self._patience = patience
        self._owner = owner
        self._usable = True

    def get(
        self,
        facts: Mapping[str, object],
        size: int,
        build: Callable[[], np.ndarray],
        what: str = "an index",
        patience: float = 0.0,
    ) -> np.ndarray:
        """Return the array of `size` int32 that `build` makes; `facts` determine it.

        what: the array in words. patience: seconds, if it needs more than the cache's.
        """
        text = json.dumps(facts, sort_keys=True).encode()
        path = os.path.join(self.directory, hashlib.sha256(text).hexdigest() + ".npy")
        if self._usable:
            try:
                found = self._read(path, text, size)
                if found is not None:
                    return found
                os.makedirs(self.directory, exist_ok=True)
                with self._locked(path + ".lock", what, max(patience, self._patience)):
                    with self.activity.doing(f"making {what} in {self.directory}"):
                        return self._build(path, text, size, build)
            except OSError as error:
                self._give_up(error)
        return build()

    def _give_up(self, error: OSError) -> None:
        """Use no cache from now on."""
        self._usable = False
        self.report(
            f"index cache {self.directory}: {error.strerror}; building in memory "
            "(--data-cache-path names another directory)"
        )

    def _build(
        self, path: str, text: bytes, size: int, build: Callable[[], np.ndarray]
    ) -> np.ndarray:
        found = self._read(path, text, size)  # another process may have built it meanwhile
        if found is None:
            found = build()
            assert found.dtype == np.int32 and found.shape == (size,)
            try:
                with replacing(path) as file:
                    np.save(file, np.concatenate((found, _seal(text, found))), allow_pickle=False)
            except OSError as error:  # a full disk: what was built is used
                self._give_up(error)
        return found

    def _read(self, path: str, text: bytes, size: int) -> np.ndarray | None:
        """Return an entry; None if it is absent, truncated, not trusted or does not match."""
        try:
            with open_plain(path, os.O_NOFOLLOW) as file:
                found = os.fstat(file.fileno())
                if found.st_uid != self._owner and not trusted(found.st_uid):
                    return None
                version = np.lib.format.read_magic(file)  # .npy only: no zip, no pickle
                if version != (1, 0):
                    return None
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
                if dtype != np.int32 or shape != (size + WORDS,) or fortran:
                    return None
                if found.st_size != file.tell() + 4 * shape[0]:
                    return None
                stored: np.ndarray
                if found.st_size > READ_LIMIT:
                    stored = np.memmap(file, np.int32, "r", file.tell(), shape)
                else:
                    stored = np.frombuffer(file.read(), np.int32)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.EINVAL):  # a link, a pipe
                return None
            raise
        except (ValueError, EOFError):
            return None
        array = np.asarray(stored[:size])
        return array if np.array_equal(_seal(text, array), stored[size:]) else None

    @contextmanager
    def _locked(self, path: str, what: str, patience: float) -> Iterator[None]:
        """Hold an exclusive lock that the kernel drops when its holder dies."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, f"{path} is not a plain file", path)
            if not _lock(fd):
                with self.activity.waiting(
                    "waiting for another process",
                    lambda: f"waiting for {what}, which another process makes ({path})",
                    limit=patience,
                    over=lambda: f"{what} is ready",
                    aloud=None,
                ):
                    began = time.monotonic()
                    while not _lock(fd):
                        waited = time.monotonic() - began
                        if waited > patience:
                            raise TimeoutError(0, f"{path} has been locked for {patience:.0f} s")
                        time.sleep(0.02 if waited < 1 else 0.2)
            yield
        finally:
            os.close(fd)


def _lock(fd: int) -> bool:
    """Lock an open file; return False if another process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _seal(text: bytes, array: np.ndarray) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(text + array.tobytes()).digest(), np.int32)
