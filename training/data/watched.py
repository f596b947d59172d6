# SPDX-License-Identifier: Apache-2.0
"""Read a file of the corpus by pread, and detect when it is truncated or overwritten.

With a memory map, a truncated file would end the process by SIGBUS, without a message.
"""

import os
import time
from collections.abc import Callable
from threading import Lock, get_ident

import numpy as np

from training.data.dataset import DataError
from training.files.untrusted import open_plain


class WatchedFile:
    """A plain file that must stay as it was when it was opened; threads may share it.

    size: bytes; stamp: (size, mtime, ctime), times in ns. Raises OSError if it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open_plain(path)
        self._fd = self._file.fileno()
        found = os.fstat(self._fd)
        self.size, self._mtime, self._ctime = found.st_size, found.st_mtime_ns, found.st_ctime_ns
        self.stamp = (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        self.owner = found.st_uid
        self._reads: dict[int, tuple[float, int]] = {}  # {thread: (since, byte)}
        self._lock = Lock()

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from byte `offset` on. Raises DataError, naming both, for fewer."""
        thread = get_ident()
        self._reads[thread] = (time.monotonic(), offset)
        try:
            data = os.pread(self._fd, size, offset)
        except OSError as error:
            raise DataError(f"{self.path}: byte {offset}: {error.strerror}") from error
        finally:
            del self._reads[thread]
        if len(data) == size:
            return data
        buffer = np.empty(size, np.uint8)  # a system may return less than requested
        self.fill(buffer, offset)
        return buffer.tobytes()

    def under_way(self) -> str:
        """Return the file, byte and duration of the longest read in progress, or ""."""
        since, offset = min(tuple(self._reads.values()), default=(0.0, -1))
        if offset < 0:
            return ""
        return f"{self.path}, byte {offset}: a read has taken {time.monotonic() - since:.1f} s"

    def fill(self, array: np.ndarray, offset: int) -> None:
        """Fill an array with the bytes from `offset` on. Raises DataError if there are fewer."""
        view, done = array.reshape(-1).view(np.uint8).data, 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise DataError(f"{self.path}: byte {offset}: {error.strerror}") from error
            if not got:
                raise self._short(offset, len(view), done)
            done += got

    def check(self, unchanged: Callable[[], bool] = lambda: False) -> None:
        """Raise DataError if the file was changed since it was opened.

        Its mtime can be set back, as `cp -p` and `rsync --times` do; its ctime cannot. But the
        ctime also changes if the file is renamed, removed or gets other permissions: then
        unchanged() is called, once, and returns whether its contents are the same.
        """
        found = os.fstat(self._fd)
        if found.st_size != self.size:
            raise DataError(
                f"{self.path} was changed while it was read: it had {self.size} bytes and has "
                f"{found.st_size}"
            )
        if found.st_mtime_ns != self._mtime:
            raise DataError(f"{self.path} was changed while it was read: it was written to")
        if found.st_ctime_ns != self._ctime:
            with self._lock:
                if found.st_ctime_ns != self._ctime and not unchanged():
                    raise DataError(
                        f"{self.path} was changed while it was read: it was written to, and its "
                        "modification time was set back"
                    )
                self._ctime = found.st_ctime_ns

    def close(self) -> None:
        """Close the file; nothing can be read from it then."""
        self._file.close()

    def _short(self, offset: int, size: int, got: int) -> DataError:
        now = os.fstat(self._fd).st_size
        return DataError(
            f"{self.path}: {size} bytes were wanted at byte {offset} and {got} are there: the file "
            f"had {self.size} bytes when it was opened and has {now}"
        )
