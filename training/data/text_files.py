# SPDX-License-Identifier: Apache-2.0
"""Find the files of text that names stand for, check them early, and open them.

It needs nothing but Python, so that files are checked before anything is installed.
"""

import glob
import gzip
import importlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import BufferedReader, RawIOBase
from typing import Any, BinaryIO

from training.untrusted import open_plain

KINDS = ("txt", "jsonl", "parquet")
PACKED = (".gz", ".zst")  # of .txt and .jsonl
NAMES = ".txt nor .jsonl (also as .gz or .zst) nor .parquet"
BEGINNINGS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1"}
PACKAGES = {".zst": "zstandard", ".parquet": "pyarrow"}


def kind_of(path: str) -> str:
    """Return "txt", "jsonl" or "parquet"; raise ValueError for other names."""
    packed = path.endswith(PACKED)
    kind = (path.rpartition(".")[0] if packed else path).rpartition(".")[2]
    kind = "jsonl" if kind == "json" else kind  # as Megatron-LM's pages call lines of JSON
    if kind not in KINDS or (packed and kind == "parquet"):
        raise ValueError(f"{path}: neither {NAMES}")
    return kind


def _known(path: str) -> bool:
    """Return whether a folder includes this file: not a .json, which may be anything."""
    try:
        return bool(kind_of(path)) and not path.endswith((".json", ".json.gz", ".json.zst"))
    except ValueError:
        return False


def split_names(text: str) -> list[str]:
    """Return the names in "a.txt my file.jsonl b/*": a name with spaces is one if it is there.

    Of all ways to read the words, the longest name that is there is taken first.
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
    return os.path.lexists(name) or any(True for _ in glob.iglob(name))


def find_files(names: Iterable[str], flag: str = "--input") -> list[str]:
    """Return the files that names mean, each once: a file, a folder of them, or a pattern.

    A folder stands for all files below it whose names `kind_of` knows, a pattern such as a/*.txt
    for what it matches; both in the order of their names. A file that several names reach
    through links is taken by the first. Raises ValueError, which names the flag, where there is no
    such file.
    """
    found: dict[str, str] = {}  # by the name without links
    for name in names:
        if os.path.isdir(name):
            some = [
                os.path.join(folder, file)
                for folder, _, files in os.walk(name)
                for file in files
                if _known(file) and not file.startswith(".")
            ]
            if not some:
                raise ValueError(f"{flag} {name}: a folder without a file of text, neither {NAMES}")
        elif os.path.lexists(name):
            some = [name]
        elif not glob.has_magic(name):
            raise ValueError(f"{flag} {name}: cannot be read (No such file or directory)")
        else:
            some = [f for f in glob.iglob(name, recursive=True) if not os.path.isdir(f)]
            if not some:
                raise ValueError(f"{flag} {name}: no file matches")
        for file in sorted(some):
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def stat_files(paths: Sequence[str], flag: str = "--input") -> list[tuple[str, int, int]]:
    """Return (absolute path, bytes, time of the last change in ns) of each file, once checked.

    The time is that of the status (ctime) where this is later: an mtime can be set back.
    It is checked that each is a plain file which can be read, has the beginning of its kind, and
    that the package which reads it is there. Raises ValueError naming the flag and the file.
    """
    files = []
    for path in paths:
        kind_of(path)
        try:
            with open_plain(path) as file:
                status, begin = os.fstat(file.fileno()), file.read(4)
        except OSError as error:
            raise ValueError(f"{flag} {path}: cannot be read ({error.strerror})") from error
        assert stat.S_ISREG(status.st_mode), path
        for ending, wanted in BEGINNINGS.items():
            if path.endswith(ending) and begin and not begin.startswith(wanted):
                raise ValueError(
                    f"{flag} {path}: it does not begin as a {ending} file does; rename it to what "
                    "it is"
                )
        if begin[:2] in (b"\xff\xfe", b"\xfe\xff") and not path.endswith(tuple(BEGINNINGS)):
            raise ValueError(f"{flag} {path}: it is UTF-16; text must be UTF-8")
        if path.endswith(".json") and begin.lstrip().startswith(b"["):
            raise ValueError(
                f"{flag} {path}: it is one JSON array; one JSON object a line is needed (jq -c "
                "'.[]' makes such lines)"
            )
        need_package(path)
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        files.append((os.path.abspath(path), status.st_size, changed))
    if files and not any(size for _, size, _ in files):
        raise ValueError(f"{flag} {paths[0]}: no document with text in {len(files)} file(s)")
    return files


def need_package(path: str) -> None:
    """Raise ValueError where the package that reads a file is not installed."""
    for ending, package in PACKAGES.items():
        if path.endswith(ending) and not find_spec(package):
            raise ValueError(
                f"{path}: {ending} files are read by the package {package}, which is not "
                f"installed: .venv/bin/pip install {package}"
            )


@contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, BufferedReader]]:
    """Open a file of text: yield (its text as bytes, the file itself)."""
    with open_plain(path) as file:
        if path.endswith(".gz"):
            with gzip.GzipFile(fileobj=file) as text:
                yield text, file  # type: ignore[misc]
        elif path.endswith(".zst"):
            need_package(path)
            with BufferedReader(_Zstd(file), 1 << 16) as text:
                yield text, file
        else:
            yield file, file


class _Zstd(RawIOBase):
    """The text of a .zst file, frame after frame. Raises EOFError where it was cut short."""

    STEP = 1 << 12  # bytes of input at a time, which make 200 MB of text at the very most

    def __init__(self, file: BufferedReader) -> None:
        self._file, self._left = file, b""
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
                parts.append(self._frame.decompress(data))
                data = self._frame.unused_data if self._frame.eof else b""
                self._frame = None if self._frame.eof else self._frame
            self._left = b"".join(parts)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size
