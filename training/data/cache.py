# SPDX-License-Identifier: Apache-2.0
"""Cache sample indices on disk, so that each node builds an index once.

The processes of a node synchronize by a file lock, so they need neither a shared file system nor a
process group. An entry is one .npy of int32 whose last eight words are the SHA-256 of the rest and
of the facts it was built from; an entry that does not match its SHA-256 is built again.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from training.data.files import replacing

WORDS = 8  # of int32 in a SHA-256


class IndexCache:
    """Read int32 arrays from a directory, or build them there under a lock.

    A directory that cannot be used is reported once by `report`; arrays are then built in memory.
    `patience`: for how many seconds another process may hold the lock of an entry.
    """

    def __init__(
        self, directory: str, report: Callable[[str], None] = print, patience: float = 600.0
    ) -> None:
        self.directory = directory
        self._report = report
        self._patience = patience
        self._usable = True

    def get(
        self, facts: Mapping[str, object], size: int, build: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Return the array of `size` int32 that `build` makes; `facts` determine it."""
        text = json.dumps(facts, sort_keys=True).encode()
        path = os.path.join(self.directory, hashlib.sha256(text).hexdigest() + ".npy")
        if self._usable:
            try:
                found = _read(path, text, size)
                return self._build(path, text, size, build) if found is None else found
            except OSError as error:
                self._usable = False
                self._report(
                    f"index cache {self.directory}: {error.strerror}; building in memory "
                    "(--data-cache-path names another directory)"
                )
        return build()

    def _build(
        self, path: str, text: bytes, size: int, build: Callable[[], np.ndarray]
    ) -> np.ndarray:
        os.makedirs(self.directory, exist_ok=True)
        with _locked(path + ".lock", self._patience):
            found = _read(path, text, size)  # another process may have built it meanwhile
            if found is None:
                found = build()
                assert found.dtype == np.int32 and found.shape == (size,)
                with replacing(path) as file:
                    np.save(file, np.concatenate((found, _seal(text, found))), allow_pickle=False)
        return found


def _seal(text: bytes, array: np.ndarray) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(text + array.tobytes()).digest(), np.int32)


def _read(path: str, text: bytes, size: int) -> np.ndarray | None:
    """Return an entry, memory-mapped; None where it is absent, cut short or does not match."""
    try:
        stored = np.lib.format.open_memmap(path, mode="r")  # .npy only: no zip, no pickle
    except (FileNotFoundError, ValueError, EOFError):
        return None
    if stored.dtype != np.int32 or stored.shape != (size + WORDS,):
        return None
    array = np.asarray(stored[:size])
    return array if np.array_equal(_seal(text, array), stored[size:]) else None


@contextmanager
def _locked(path: str, patience: float) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops when its holder dies."""
    deadline = time.monotonic() + patience
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(0, f"{path} is locked for {patience:.0f} s") from error
                time.sleep(0.02)
        yield
