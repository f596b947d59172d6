# SPDX-License-Identifier: Apache-2.0
"""Read files that others may have written, print their text safely, keep own files private.

Only plain files are opened: a pipe or a device would hang a run or never end. JSON is read with
limits on its size, its depth and its numbers; of another program's file only what is read counts.
Checkpoints, caches and copies count only if they belong to this user, to root, or to a user whom
--trust-owner names.
"""

import errno
import glob
import json
import math
import os
import pwd
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

SETTINGS = 1 << 24  # most bytes of a JSON file of settings
DEPTH = 64  # most levels of JSON
OURS = ("runs", "data", "checkpoints", "models", "out", "tmp")  # folders, and nobody's name there
LONGEST, SHOWN = 1000, 3  # characters of a message, and names in a list
_trusted: set[int] = set()  # users of --trust-owner (why it is global: docs/design.md, 11)
_LONG = re.compile(r"\d{19}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def folders_below(path: str | os.PathLike[str], file: str) -> list[str]:
    """Return the folders up to three levels below this one that hold a file of this name, which
    may have wildcards, in order.
    """
    found = (glob.iglob(f"{'*/' * deep}{file}", root_dir=path) for deep in (1, 2, 3))
    return sorted({os.path.join(path, os.path.dirname(name)) for names in found for name in names})


def nothing_downloaded(path: str | os.PathLike[str]) -> str:
    """Return "nothing is downloaded", with the command that downloads a model where a path that is
    not there looks like a name on Hugging Face, owner/model; of a folder of models, such as a
    trainer's checkpoints or a snapshot in Hugging Face's cache, the last of them.
    """
    if models := folders_below(path, "config.json"):
        return f"it is a folder of models: give one, such as {printable(models[-1])}"
    owner, _, folder = str(path).partition("/")
    parts = (owner, folder)
    named = all(re.fullmatch(r"[\w-][\w.-]*", part) for part in parts)
    if owner in OURS or os.path.isdir(owner) or not named:
        return "nothing is downloaded"
    return (
        f"nothing is downloaded; if that is a model on Hugging Face, `hf download {path} "
        f"--local-dir {folder}`, and give {folder}"
    )


def trust_owners(users: Iterable[str]) -> None:
    """Trust these users in place of those named before, by names or numbers.

    Raises ValueError for a name that is not known here.
    """
    found = set()
    for user in users:
        try:
            found.add(int(user) if user.isascii() and user.isdigit() else pwd.getpwnam(user).pw_uid)
        except (KeyError, ValueError):
            raise ValueError(
                f"--trust-owner {user}: no user has this name here; a number is taken too, as "
                "`ls -ln` prints it"
            ) from None
    _trusted.clear()
    _trusted.update(found)


def trusted(owner: int) -> bool:
    """Return whether what a user owns counts: this user, root, or one of --trust-owner."""
    return owner in {0, os.geteuid(), *_trusted}


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


def read_json(path: str | os.PathLike[str], limit: int = SETTINGS, foreign: bool = False) -> Any:
    """Return what a JSON file of at most `limit` bytes holds. Raises OSError and ValueError."""
    return parse_json(read_plain(path, limit), os.fspath(path), foreign)


def parse_json(data: bytes | str, name: str, foreign: bool = False, infinite: bool = False) -> Any:
    """Return what JSON text holds. Raises ValueError that begins with `name`.

    Refused: what is not UTF-8 or has half a surrogate pair, NaN and infinities, floats beyond
    double precision, integers beyond 64 bits, a key twice in an object, more than DEPTH levels.

    foreign: another program wrote the file, for readers of its own. Python's json, and with it
    transformers, writes numbers of any length, NaN and Infinity. Such a value, and a key that
    is there twice with different values, is refused when it is read (`ForeignObject`).
    infinite: NaN, Infinity and -Infinity are read as floats, for a run's record of its numbers.
    """
    parser = _Parser(name if foreign else None)
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(
            text,
            object_pairs_hook=parser.object,
            parse_constant=float if infinite else parser.constant,
            parse_float=parser.number,
            parse_int=parser.integer if _LONG.search(text) else None,
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False, default=str).encode()
        _check_depth(value)
        if found := _unreadable(value):  # the text is one such number, or an array with one
            raise ValueError(found.why)
        return value
    except (ValueError, RecursionError) as error:
        why = f"more than {DEPTH} levels" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{name} is not JSON: {why}") from None


class ForeignObject(dict[str, Any]):
    """An object of another program's JSON: reading a value that was refused raises ValueError.

    Values are read by [key] and get; the others see the reason in place of the value.
    """

    def __getitem__(self, key: str) -> Any:
        """Return a value."""
        value = super().__getitem__(key)
        if found := _unreadable(value):
            raise ValueError(f"{found.where}: {key}: {found.why}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` where the key is not there."""
        return self[key] if key in self else default


@dataclass(frozen=True)
class _Unreadable:
    """A value that was refused. where: the file."""

    where: str
    why: str


def _unreadable(value: Any) -> _Unreadable | None:
    """Return what was refused in a value: itself, or a part of an array."""
    if isinstance(value, list):
        return next((found for part in value if (found := _unreadable(part))), None)
    return value if isinstance(value, _Unreadable) else None


class _Parser:
    """What json.loads calls. foreign: the name of another program's file (`parse_json`)."""

    def __init__(self, foreign: str | None) -> None:
        self._foreign = foreign

    def _refuse(self, why: str) -> Any:
        if self._foreign is None:
            raise ValueError(why)
        return _Unreadable(self._foreign, why)

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs) if self._foreign is None else ForeignObject(pairs)
        if len(found) != len(pairs):
            for name in (n for n, count in Counter(n for n, _ in pairs).items() if count > 1):
                values = [value for key, value in pairs if key == name]
                if self._foreign is None or any(value != values[0] for value in values):
                    why = f"the key {name!r} occurs twice in an object"
                    found[name] = self._refuse(why)
        return found

    def constant(self, word: str) -> Any:
        return self._refuse(f"{word} is not a JSON number")

    def number(self, text: str) -> Any:
        number = float(text)
        if math.isfinite(number):
            return number
        return self._refuse(f"{text[:40]} is not a finite number")

    def integer(self, text: str) -> Any:
        if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
            return self._refuse(f"{text[:40]} does not fit into 64 bits")
        return int(text)


def _check_depth(value: Any) -> None:
    """Raise RecursionError for more than DEPTH levels of objects and arrays."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEPTH):
        level = [
            part
            for outer in level
            for part in (outer.values() if isinstance(outer, dict) else outer)
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


def first_of(names: Sequence[str], most: int = SHOWN) -> str:
    """Return the first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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


def printable(text: str, lines: bool = False, most: int | None = None) -> str:
    """Return text with every character that a terminal might obey written out, as in \\x1b.

    lines: keep line ends. most: characters of `text`; a longer one is cut, and ends in "...".
    """
    if most is not None and len(text) > most:
        text = text[: most - 3] + "..."
    if text.isprintable():
        return text
    keep = "\n" if lines else ""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
