# SPDX-License-Identifier: Apache-2.0
"""Write a file so that other processes see all of it or none of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on success and is removed on failure."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
