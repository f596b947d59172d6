# SPDX-License-Identifier: Apache-2.0
"""Write a file so that other processes see all of it or none of it."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from training.files.owned import Ours, anybody, check


@contextmanager
def replacing(path: str, ours: Ours = anybody) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on success and is removed on failure.

    Its name cannot be guessed and it is new, so that no existing file is written through. ours:
    whether an existing `path` may be replaced (training/files/owned.py). Raises FileExistsError if
    it may not.
    """
    check(Path(path), ours)
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(fd, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check(Path(path), ours)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def write_text(path: str | os.PathLike[str], text: str, ours: Ours) -> None:
    """Write a file of text in the place of an older one. Raises FileExistsError, as above."""
    with replacing(os.fspath(path), ours) as file:
        file.write(text.encode())
