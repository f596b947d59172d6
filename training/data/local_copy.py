# SPDX-License-Identifier: Apache-2.0
"""Copy a corpus to a disk of this host before it is read (--data-local-copy).

The first process of a host that asks copies, and the others wait for it. A copy is complete or
absent: it is written aside and renamed, and it is made again if the original has another size or
time. Nothing is removed: a folder of copies is the user's to empty.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress

from training.data.dataset import DataError
from training.data.files import replacing
from training.data.loss_mask import ENDS
from training.faults.activity import Activity
from training.files.untrusted import open_plain, trusted

BLOCK = 16 << 20  # bytes of one read
QUIET = 5.0  # seconds before progress is reported, and between two lines of it
FLAG = "--data-local-copy"


def local_copy(
    prefix: str,
    directory: str,
    report: Callable[[str], None] = print,
    activity: Activity | None = None,
) -> str:
    """Return the prefix of this host's copy of a .bin/.idx pair, and its loss mask, once it is
    there.

    activity: prints that another process takes long to make it. Raises ValueError
    naming the flag where it cannot be made, DataError where the original changes meanwhile.
    """
    try:
        mask = [end for end in ENDS if os.path.lexists(prefix + end)]
        found = {end: os.stat(prefix + end) for end in (".idx", ".bin", *mask)}
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from error
    times = ((s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found.values())
    facts = [os.path.abspath(prefix), *times]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    folder = os.path.join(directory, name)
    copy = os.path.join(folder, os.path.basename(prefix))
    try:
        if all(_there(copy + end, s.st_size) for end, s in found.items()):
            return copy
        os.makedirs(folder, exist_ok=True)
        owner = os.stat(folder).st_uid
        if owner != os.geteuid() and not (trusted(owner) and os.access(folder, os.W_OK | os.X_OK)):
            raise ValueError(
                f"{FLAG} {directory}: the copy of {prefix} there belongs to the user with number "
                f"{owner}: --trust-owner {owner} reads it once it is complete, or name another "
                "directory"
            )
        lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            with (activity or Activity(tell=report)).waiting(
                "waiting for another process",
                lambda: f"waiting for a copy of {prefix}, which another process makes in {folder}",
                limit=0.0,
                over=lambda: f"the copy of {prefix} is there",
                aloud=None,
            ):
                fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it where its holder dies
            missing = [end for end, s in found.items() if not _there(copy + end, s.st_size)]
            room, needed = shutil.disk_usage(folder).free, sum(found[e].st_size for e in missing)
            if needed > room:
                raise ValueError(
                    f"{FLAG} {directory}: a copy of {prefix} needs {needed:,} bytes and {room:,} "
                    "are free"
                )
            for end in missing:
                _copy(prefix + end, copy + end, report)
        finally:
            os.close(lock)
    except OSError as error:
        raise ValueError(f"{FLAG} {directory}: {error.filename}: {error.strerror}") from error
    return copy


def _there(path: str, size: int) -> bool:
    """Return whether a complete copy of a trusted user's is there."""
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        return found.st_size == size and trusted(found.st_uid)
    return False


def _copy(source: str, target: str, report: Callable[[str], None]) -> None:
    """Copy a file, telling rate and time left where it takes long."""
    with open_plain(source) as file, replacing(target) as out:
        before = os.fstat(file.fileno())
        size, done, began = before.st_size, 0, time.monotonic()
        reported = began
        while block := file.read(BLOCK):
            out.write(block)
            done, now = done + len(block), time.monotonic()
            if now - reported >= QUIET:
                reported, rate = now, done / (now - began)
                report(
                    f"{source}: {done / max(size, 1):.0%} of {size:,} bytes copied to "
                    f"{os.path.dirname(target)}, {rate / 1e9:.2f} GB/s, "
                    f"{max(0, size - done) / rate:.0f} s left"
                )
        after = os.fstat(file.fileno())
        same = all(
            getattr(before, name) == getattr(after, name)
            for name in ("st_size", "st_mtime_ns", "st_ctime_ns")
        )
        if done != size or not same:
            raise DataError(f"{source} was changed while it was copied: {done} of {size} bytes")
