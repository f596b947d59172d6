# SPDX-License-Identifier: Apache-2.0
"""Read the files of tokenizers, and call their libraries in other languages safely."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from training.files.untrusted import nothing_downloaded, read_plain

LARGEST = 1 << 27  # bytes of a tokenizer's file


def read_model(path: str, flag: str = "--tokenizer-model") -> bytes:
    """Return the bytes of a tokenizer's file. Raises ValueError naming the flag."""
    try:
        return read_plain(path, LARGEST)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        more = f" ({nothing_downloaded(path)})" * absent
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}{more}") from error


def begin(tokenizer: Any, wanted: bool) -> list[int]:
    """Return [bos] if it is wanted, else []. Raises ValueError for a tokenizer without one."""
    if not wanted:
        return []
    if tokenizer.bos is None:
        raise ValueError(f"this {tokenizer.name} has no beginning-of-text token")
    return [tokenizer.bos]


@contextmanager
def calling(what: str, mute: bool = False) -> Iterator[None]:
    """Raise ValueError, beginning with `what`, if the block's calls fail.

    The libraries raise plain Exceptions, and a BaseException if Rust panics. mute: suppress stderr
    meanwhile, such as a panic's backtrace; for the start of a process only.
    """
    saved_stderr = os.dup(2) if mute else -1
    try:
        if mute:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.close(null)
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{what}: {lines[0]}") from None
    finally:
        if mute:
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)
