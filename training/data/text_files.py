# SPDX-License-Identifier: Apache-2.0
"""Find the files of text that names refer to, check them early, and open them.

This module needs nothing but Python, so that files are checked before anything is installed.
"""

import glob
import gzip
import importlib
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec
from io import BufferedReader, RawIOBase
from typing import Any, BinaryIO

from training.data.bad_documents import listed
from training.files.untrusted import open_plain, printable

KINDS = ("txt", "jsonl", "parquet")
PACKED = (".gz", ".zst")  # of .txt and .jsonl
NAMES = ".txt nor .jsonl (also as .gz or .zst) nor .parquet"
SKIPPABLE = tuple(bytes([n]) + b"\x2a\x4d\x18" for n in range(0x50, 0x60))  # RFC 8878, 3.1.2
BEGINNINGS = {
    ".gz": (b"\x1f\x8b",),
    ".zst": (b"\x28\xb5\x2f\xfd", *SKIPPABLE),
    ".parquet": (b"PAR1",),
}
PACKAGES = {".zst": "zstandard", ".parquet": "pyarrow"}
POINTERS = {  # {beginning of a small file in place of the text: the command that fetches the text}
    b"version https://git-lfs.github.com/spec/": "git lfs pull",
    b"version https://hawser.github.com/spec/": "git lfs pull",
    b"/annex/objects/": "git annex get",
}

# Why a file is left out. A file of another kind has its ending as the reason.
HIDDEN, SYSTEM, PARTIAL = "hidden", "in a system folder", "partly downloaded"
OTHER, JSON, BROKEN = "of another kind", ".json not named itself", "behind a broken link"
EMPTY, AGAIN, COPY = "empty", "found again", "compressed beside the plain file"
RECORD = "describing a pair"  # of tools/preprocess_data.py, which *.json matches
SYSTEM_FOLDERS = re.compile(  # of unpackers, trash cans, disks, snapshots and tables
    r"__macosx|@?paxheaders?(\.\d+)?|gnusparsefile\.\d+|__pycache__|"
    r"\$recycle\.bin|recycler|recycled|[#@]recycle|trash|files_trashbin|files_versions|"
    r"lost\+found|found\.\d+|system volume information|@eadir|[#~]snapshot|@recently-snapshot|"
    r"network trash folder|temporary items|_temporary|_delta_log|_spark_metadata",
    re.IGNORECASE,
)
PARTIAL_ENDINGS = (
    *(".part", ".partial", ".filepart", ".tmp", ".temp", ".incomplete", ".download", ".aria2"),
    *(".crdownload", ".opdownload", ".!qb", ".!ut"),
)
EVERYTHING = ("**", "*")  # a folder's pattern


def wide_encoding(begin: bytes) -> str:
    """Return "UTF-16" or "UTF-32" if a text begins with its byte order mark, or without a mark with
    four letters of ASCII or more, which would be valid UTF-8 with NULs between them; else "".
    """
    if begin.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if begin.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    for name, size in (("UTF-32", 4), ("UTF-16", 2)):
        whole = begin[: len(begin) // size * size] if len(begin) >= 4 * size else b""
        nul = [not any(whole[i::size]) for i in range(size)]  # of each byte of a character
        if whole and nul in ([False] + [True] * (size - 1), [True] * (size - 1) + [False]):
            used = whole[0 if nul[-1] else size - 1 :: size]
            return name if all(used) else ""
    return ""


def ending_of(path: str) -> str:
    """Return ".gz", ".zst", ".parquet", ...: the last ending of a name, in lower case."""
    return os.path.splitext(path)[1].lower()


def kind_of(path: str) -> str:
    """Return "txt", "jsonl" or "parquet", also for .TXT; raise ValueError for other names."""
    packed = ending_of(path) in PACKED
    kind = (path.rpartition(".")[0] if packed else path).rpartition(".")[2].lower()
    kind = "jsonl" if kind == "json" else kind  # as Megatron-LM's pages call lines of JSON
    if kind not in KINDS or (packed and kind == "parquet"):
        raise ValueError(f"{path}: neither {NAMES}")
    return kind


def split_names(text: str) -> list[str]:
    """Return the names in "a.txt my file.jsonl b/*": words form one name if such a file exists.

    From each word on, the longest name that exists is taken.
    """
    words, names, at = text.split(" "), [], 0
    while at < len(words):
        ends = range(len(words), at, -1)
        end = next((e for e in ends if _there(" ".join(words[at:e]))), at + 1)
        if name := " ".join(words[at:end]):
            names.append(name)
        at = end
    return names


def _there(name: str) -> bool:
    if glob.has_magic(name) and not os.path.lexists(name):
        return any(True for _ in _reached(name, "DATA", set()))
    return os.path.lexists(name)


def any_text(name: str) -> bool:
    """Return whether `find_files` would read a file by this name, up to the first one."""
    try:
        return any(not why and kind_of(path) for path, why in _reached(name, "", set()))
    except ValueError:  # it is of another kind, is missing, or cannot be listed
        return False


def find_files(
    names: Sequence[str], flag: str = "--input", report: Callable[[str], object] | None = None
) -> list[str]:
    """Return the files that names refer to, each once. A name is a file, a folder or a pattern.

    A folder is read as the pattern folder/**/*. A file that a pattern matches is read, or left out
    for one of the reasons above; a folder that it matches includes everything below, and links to
    folders are followed. A file that is named is left out only if it is empty, its text is read
    already, or it is a record of our own. Each name's files are in the order of their names.

    report: called with a line on how many files are read and how many are left out, and why; not
    called if exactly the files that are named are read. Raises ValueError, which names the flag, if
    a name refers to no file of text, a folder cannot be read, or every file is empty.
    """
    read: dict[object, str] = {}  # by device and inode: one file may have two names
    left: dict[tuple[str, str], str] = {}  # {(reason, name without links): name}
    walked: set[object] = set()
    for name in names:
        reached = sorted(dict(_reached(name, flag, walked)).items())
        if all(why not in ("", AGAIN) for _, why in reached):
            kinds = _counted((why, path) for path, why in reached)
            rule = f"neither {NAMES}" + f"; left out: {listed(kinds)}" * bool(kinds)
            if os.path.isdir(name):
                raise ValueError(f"{flag} {name}: a folder without a file of text, {rule}")
            what = f"no file of text matches, {rule}" if kinds else "no file matches"
            raise ValueError(f"{flag} {name}: {what}")
        for path, why in reached:
            key, size = (path, 0) if why else _identity(path)
            if not why and size and key not in read and _is_record(path):
                why = RECORD
            if why := why or (EMPTY if not size else AGAIN if key in read else ""):
                left[why, path if why == AGAIN else os.path.realpath(path)] = path
            else:
                read[key] = path
    if left and not read:
        empty = [path for (why, _), path in left.items() if why in (EMPTY, RECORD)]
        raise ValueError(f"{flag} {empty[0]}: no document with text in {len(empty):,} file(s)")
    names_read = {os.path.abspath(path) for path in read.values()}
    copies = {path: COPY for path in read.values() if not names_read.isdisjoint(_plain(path))}
    files = [path for path in read.values() if path not in copies]
    real = {os.path.realpath(path) for path in files}  # read by one name, left out by another
    copied = [(why, path) for path, why in copies.items()]
    rest = [(why, path) for (why, at), path in left.items() if why == AGAIN or at not in real]
    kinds = _counted([pair for pair in rest if pair[1] not in copies] + copied)
    if report is not None and files != list(names):
        count = sum(number for number, _ in kinds.values())
        left_out = f", {count:,} left out: {listed(kinds)}" * bool(kinds)
        report(printable(f"{flag}: {len(files):,} file(s) read{left_out}"))
    return files


def _identity(path: str) -> tuple[object, int]:
    """Return (identity of a file on its disk, size in bytes or 1 if `stat_files` refuses it)."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return path, 1
    key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return key, status.st_size if stat.S_ISREG(status.st_mode) else 1


def _is_record(path: str) -> bool:
    """Return whether a file is a record of what tools/preprocess_data.py wrote."""
    if ending_of(path) != ".json":
        return False
    try:
        with open_plain(path) as file:
            return re.match(rb'\s*\{\s*"format": "weft-', file.read(64)) is not None
    except OSError:  # `stat_files` reports why
        return False


def _plain(path: str) -> list[str]:
    """Return the names of files that hold the same text less compressed."""
    plain = os.path.splitext(os.path.abspath(path))[0]
    return {".gz": [plain], ".zst": [plain, f"{plain}.gz"]}.get(ending_of(path), [])


def _counted(reasons: Iterable[tuple[str, str]]) -> dict[str, tuple[int, str]]:
    """Return {reason: (how many, the first name)} of pairs (reason, name)."""
    kinds: dict[str, tuple[int, str]] = {}
    for why, path in reasons:
        count, first = kinds.get(why, (0, path))
        kinds[why] = count + 1, first
    return kinds


def _reached(name: str, flag: str, walked: set[object]) -> Iterable[tuple[str, str]]:
    """Return (file, why it is left out, or "") for all files that a name refers to."""
    if os.path.isdir(name):
        return _walk(name, EVERYTHING, flag, walked)
    if os.path.lexists(name):
        return [(name, "")]
    if not glob.has_magic(name):
        raise ValueError(f"{flag} {name}: cannot be read (No such file or directory)")
    parts = name.split(os.sep)
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = os.sep.join(parts[:first]) or os.sep * (first > 0)
    folders = parts[-1] in ("", "**")  # a/*/ is folders alone, and a/** all below a
    pattern = [part for part in parts[first:] if part not in ("", ".")] + ["**", "*"] * folders
    pattern = [part for i, part in enumerate(pattern) if pattern[i : i + 2] != ["**", "**"]]
    return _walk(root, tuple(pattern), flag, walked) if os.path.isdir(root or ".") else []


def _walk(
    root: str, pattern: tuple[str, ...], flag: str, walked: set[object]
) -> Iterator[tuple[str, str]]:
    """Yield (file, why it is left out, or "") for all files that a pattern matches below a folder.

    pattern: its parts; "**" matches any number of folders. walked: the folders walked so far, with
    the patterns. A folder that is reached again, such as by a link to a folder above, is yielded
    itself. Folders that are left out are walked too, so that their files are counted.
    """
    todo = [(root, {pattern}, "")]
    while todo:
        folder, wanted, why = todo.pop()
        wanted |= {parts[1:] for parts in wanted if parts[0] == "**"}  # no folder at all
        names: list[str] | None = None
        try:
            status = os.stat(folder or ".")
            key = (status.st_dev, status.st_ino, frozenset(wanted), why)
            if key not in walked:
                names = sorted(os.listdir(folder or "."), reverse=True)
                walked.add(key)
        except OSError as error:
            if not why:
                raise ValueError(f"{flag} {folder}: cannot be read ({error.strerror})") from error
        if names is None:
            yield os.path.join(folder, ""), why or AGAIN
            continue
        for name in names:
            path = os.path.join(folder, name)
            low = re.sub(r"(\.\w+){1,2}$", lambda ending: ending[0].lower(), name)  # also .JSONL
            parts = [
                p for p in wanted if p[0] == "**" or any(fnmatchcase(n, p[0]) for n in (name, low))
            ]
            spelt = any(p[0] == name or p[0].startswith(".") for p in parts)
            aside = why or ("" if spelt else _set_aside(name))
            ends = [p[0] for p in parts if len(p) == 1]
            other = _other_kind(name, ends)
            if parts and os.path.isdir(path):
                below = {p if p[0] == "**" else p[1:] or EVERYTHING for p in parts}
                todo.append((path, below, aside))
            elif parts and (other or not ends) and not os.path.exists(path):
                yield path, aside or BROKEN  # it may have been a folder
            elif ends:
                yield path, aside or other


def _set_aside(name: str) -> str:
    """Return why a pattern leaves out a file or folder that it does not spell out, or ""."""
    if name.startswith("."):
        return HIDDEN
    if SYSTEM_FOLDERS.fullmatch(name):
        return SYSTEM
    return PARTIAL if name.lower().endswith(PARTIAL_ENDINGS) else ""


def _other_kind(name: str, ends: Sequence[str]) -> str:
    """Return why a file is of another kind, its ending if it has one, or "" for text.

    ends: the last parts of patterns.

    A .json may be anything, so a pattern reads it only if it ends in .json itself.
    """
    try:
        kind_of(name)
    except ValueError:
        ending = ending_of(name)
        return ending if re.fullmatch(r"\.[a-z][a-z0-9]{0,9}", ending) else OTHER
    json = re.compile(r"\.json(\.gz|\.zst)?$", re.IGNORECASE)
    return JSON if json.search(name) and not any(map(json.search, ends)) else ""


def stat_files(paths: Sequence[str], flag: str = "--input") -> list[tuple[str, int, int]]:
    """Return (absolute path, bytes, time of the last change in ns) of each file, once checked.

    The time is that of the status (ctime) if this is later: an mtime can be set back. Each must be
    a plain, readable file with the beginning of its kind, and the package that reads it must be
    installed. Raises ValueError naming the flag and the file.
    """
    files = []
    for path in paths:
        try:
            kind_of(path)
        except ValueError as error:
            raise ValueError(
                f"{flag} {error}: rename it if it is text; where its folder is named, files of "
                "other kinds are left out"
            ) from None
        try:
            with open_plain(path) as file:
                status, begin = os.fstat(file.fileno()), file.read(64)
        except OSError as error:
            gone = os.path.islink(path) and not os.path.exists(path)
            why = f"a link to {os.readlink(path)}, which is not there" if gone else error.strerror
            raise ValueError(f"{flag} {path}: cannot be read ({why})") from error
        assert stat.S_ISREG(status.st_mode), path
        for pointer, remedy in POINTERS.items():
            if begin.startswith(pointer) and status.st_size < 1024:
                raise ValueError(
                    f"{flag} {path}: it only points to the text, which is not here: {remedy}"
                )
        if os.path.exists(f"{path}.aria2"):
            raise ValueError(f"{flag} {path}: aria2 has not downloaded all of it: {path}.aria2")
        ending = ending_of(path)
        if begin and not begin.startswith(BEGINNINGS.get(ending, b"")):
            raise ValueError(
                f"{flag} {path}: it does not begin as a {ending} file does; rename it to what it is"
            )
        packed = [  # what is ASCII alone may begin a text
            name
            for name, known in BEGINNINGS.items()
            if begin.startswith(tuple(each for each in known if not each.isascii()))
        ]
        if ending not in BEGINNINGS and packed:
            raise ValueError(f"{flag} {path}: it is a {packed[0]} file; rename it to what it is")
        if ending not in BEGINNINGS and (wide := wide_encoding(begin)):
            raise ValueError(f"{flag} {path}: it is {wide}; text must be UTF-8")
        if ending == ".json" and begin.lstrip().startswith(b"["):
            raise ValueError(
                f"{flag} {path}: it is one JSON array; one JSON object a line is needed (jq -c "
                "'.[]' makes such lines)"
            )
        need_package(path)
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        files.append((os.path.abspath(path), status.st_size, changed))
    return files


def need_package(path: str) -> None:
    """Raise ValueError if the package that reads a file is not installed."""
    ending = ending_of(path)
    if (package := PACKAGES.get(ending)) and not find_spec(package):
        raise ValueError(
            f"{path}: {ending} files are read by the package {package}, which is not "
            f"installed: .venv/bin/pip install {package}"
        )


@contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, BufferedReader]]:
    """Open a file of text: yield (its text as bytes, the file itself)."""
    with open_plain(path) as file:
        ending = ending_of(path)
        if ending == ".gz":
            with gzip.GzipFile(fileobj=file) as text:
                yield text, file  # type: ignore[misc]
        elif ending == ".zst":
            need_package(path)
            with BufferedReader(_Zstd(file, path), 1 << 16) as text:
                yield text, file
        else:
            yield file, file


class _Zstd(RawIOBase):
    """The text of a .zst file, frame after frame; skippable frames have none.

    Raises EOFError if it was truncated, OSError if a frame needs a larger window than zstandard
    grants (128 MiB), as after `zstd --long=31`.
    """

    STEP = 1 << 12  # bytes of input at a time, which make 200 MB of text at the very most

    def __init__(self, file: BufferedReader, path: str) -> None:
        self._file, self._path, self._left = file, path, b""
        self._library: Any = importlib.import_module("zstandard")
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            data = self._file.read(self.STEP)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            parts = []
            while data:
                self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
                try:
                    parts.append(self._frame.decompress(data))
                except self._library.ZstdError as error:
                    if "too much memory" not in str(error):
                        raise
                    raise OSError(
                        "it was compressed with a window of more than 128 MiB: unpack it by "
                        f"zstd -d --long=31 {shlex.quote(self._path)}"
                    ) from error
                data = self._frame.unused_data if self._frame.eof else b""
                self._frame = None if self._frame.eof else self._frame
            self._left = b"".join(parts)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size
