# SPDX-License-Identifier: Apache-2.0
"""Read files that somebody else may have written, print what they say, keep one's own to oneself.

Only plain files are opened: a pipe or a device would hang a run or never end. JSON is read with
limits on its size, its depth and its numbers.
"""

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, NoReturn

SETTINGS = 1 << 24  # most bytes of a JSON file of settings
DEPTH = 64  # most levels of JSON
LONGEST = 1000  # characters of a message
_LONG = re.compile(r"\d{19}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_plain(path: str | os.PathLike[str], flags: int = 0) -> BufferedReader:
    """Open a plain file to read; never block. flags: more of os.open's, such as O_NOFOLLOW.

    Raises OSError, whose strerror says "not a plain file" for a pipe, device or socket.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except ValueError as error:  # a null byte in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a plain file", os.fspath(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_plain(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return a plain file's bytes. Raises OSError, ValueError for more than `limit` bytes."""
    with open_plain(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{os.fspath(path)}: it has more than {limit:,} bytes")
    return data


def read_json(path: str | os.PathLike[str], limit: int = SETTINGS) -> Any:
    """Return what a JSON file of at most `limit` bytes holds. Raises OSError and ValueError."""
    return parse_json(read_plain(path, limit), os.fspath(path))


def parse_json(data: bytes | str, name: str) -> Any:
    """Return what JSON text holds. Raises ValueError that begins with `name`.

    Refused: what is not UTF-8 or has half a surrogate pair, NaN and infinities, floats beyond
    double precision, integers beyond 64 bits, a key twice in an object, more than DEPTH levels.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_int64 if _LONG.search(text) else None,
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        _check_depth(value)
        return value
    except (ValueError, RecursionError) as error:
        why = f"more than {DEPTH} levels" if isinstance(error, RecursionError) else error
        raise ValueError(f"{name} is not JSON: {why}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice in an object")
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:40]} is no finite number")
    return float(text)


def _int64(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError(f"{text[:40]} does not fit into 64 bits")
    return int(text)


def _check_depth(value: Any) -> None:
    """Raise RecursionError for more than DEPTH levels of objects and arrays."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEPTH):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, (dict, list))
        ]
        if not level:
            return
    raise RecursionError


def sentence(error: BaseException) -> str:
    """Return what an error says, on one line of at most LONGEST characters, fit to print."""
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    text = printable(text)
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 2]} [...] {text[-LONGEST // 3 :]}"


def private(path: str, flags: int) -> int:
    """Open a file, for open(opener=private): made for its owner alone, waiting for no other end."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


@contextmanager
def owner_only() -> Iterator[None]:
    """Let only this user read and write the files and folders that are made in the block."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def printable(text: str, lines: bool = False) -> str:
    """Return text with every character that a terminal might obey written out, as in \\x1b.

    lines: keep line ends.
    """
    if text.isprintable():
        return text
    keep = "\n" if lines else ""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
