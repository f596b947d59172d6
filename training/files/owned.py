# SPDX-License-Identifier: Apache-2.0
"""Replace and remove only what the same purpose wrote before.

Whoever renames over a path, removes one or empties one asks here first, and says by a predicate
`ours(path)` why the thing that is there is its own: a manifest or a record that lists all its files
(a checkpoint, a folder of --save-hf), or the form of the file (a log, a report, a picture). What is
not ours stays as it is, and the caller gets an error. docs/security.md has a table of callers.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from training.files.untrusted import open_plain, parse_json, read_plain

Ours = Callable[[Path], bool]
FOREIGN = "it was written for another purpose, or by somebody else, and is not replaced"
HEAD = 1 << 16  # bytes of a file that tell its form


def anybody(path: Path) -> bool:
    """Say that whatever is there may be replaced: its folder is this program's alone."""
    return True


def empty(path: Path) -> bool:
    """Return whether a path is a folder with nothing in it."""
    return not path.is_symlink() and path.is_dir() and not os.listdir(path)


def check(path: Path, ours: Ours) -> None:
    """Raise FileExistsError where something is at `path` that is not ours."""
    if os.path.lexists(path) and not ours(path):
        raise FileExistsError(errno.EEXIST, FOREIGN, str(path))


def refuse(flag: str, path: str | os.PathLike[str], ours: Ours, what: str) -> None:
    """Raise ValueError naming the flag where something is at `path` that is not ours.

    For a check before the work. what: the thing that may be replaced, in words.
    """
    if os.path.lexists(path) and not ours(Path(path)):
        named = f"{flag} {os.fspath(path)}".lstrip()
        raise ValueError(
            f"{named}: it exists and is not {what}, and nothing else is replaced: move it away, or "
            "give another name"
        )


def set_aside(path: Path, name: Path, ours: Ours) -> None:
    """Give something that is to be removed a name that nobody reads, so that a kill in the middle
    of the removal leaves no half of it. Raises FileExistsError where it is not ours.
    """
    check(path, ours)
    os.rename(path, name)
    fsync_directory(path.parent)


def rename(
    made: Path, target: Path, old: Path, ours: Ours, hook: Callable[[str], None] = lambda at: None
) -> None:
    """Give a folder that was just written its name; remove an older one, which must be ours.

    old: the name that the older one has meanwhile. hook(phase): "aside" (the older one has that
    name), "renamed". Raises FileExistsError where what is there is not ours; a failure leaves
    `target` as it was.
    """
    replacing = os.path.lexists(target)
    if replacing:
        set_aside(target, old, ours)
        hook("aside")
    try:
        os.rename(made, target)  # fails where another process has put a folder there since
    except OSError:
        if replacing:
            os.rename(old, target)
        raise
    fsync_directory(target.parent)
    hook("renamed")
    if replacing:
        shutil.rmtree(old, ignore_errors=True)


def json_with(*keys: str) -> Ours:
    """Return whether a path is a file with a JSON object that has these keys, or an empty file."""

    def ours(path: Path) -> bool:
        with suppress(OSError, ValueError):
            if path.is_symlink():
                return False
            data = read_plain(path, 1 << 30)
            found = parse_json(data, str(path)) if data else dict.fromkeys(keys)
            return isinstance(found, dict) and all(key in found for key in keys)
        return False

    return ours


def json_lines(key: str) -> Ours:
    """Return whether a path is a file of JSON objects with a key, one a line; or holds nothing, as
    an empty file and a pipe. The last line may be torn, as a killed run leaves it.
    """

    def ours(path: Path) -> bool:
        if path.exists() and not path.is_file():
            return not path.is_dir()
        try:
            with open_plain(path) as file:
                head = file.read(HEAD)
                file.seek(max(0, os.fstat(file.fileno()).st_size - HEAD))
                tail = file.read()
        except OSError:
            return False
        named, whole = f'"{key}"'.encode(), head.split(b"\n")[:-1]
        if not whole:  # a line that was torn, or is long
            return not head or (head.startswith(b"{") and (named in head or named[:9] in head[:12]))
        last = tail.split(b"\n")[1:-1][-1:]
        try:
            found = [parse_json(line, "line", foreign=True) for line in (*whole[:1], *last)]
        except ValueError:
            return False
        return all(isinstance(line, dict) and key in line for line in found)

    return ours


def begins(*heads: bytes) -> Ours:
    """Return whether a path is a plain file that begins with one of these bytes, or is empty."""

    def ours(path: Path) -> bool:
        with suppress(OSError), open_plain(path, os.O_NOFOLLOW) as file:
            found = file.read(max(map(len, heads)))
            return not found or found.startswith(heads)
        return False

    return ours


def plain_files(folder: Path) -> dict[str, os.stat_result] | None:
    """Return {name: facts} of a folder's files, None where it is a link, or has anything else."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return None
        found = {name: os.lstat(folder / name) for name in os.listdir(folder)}
    except OSError:
        return None
    return found if all(stat.S_ISREG(facts.st_mode) for facts in found.values()) else None


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
