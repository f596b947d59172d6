# SPDX-License-Identifier: Apache-2.0
"""Read a part of a text file, so that several processes can read one file.

A part is a range of bytes; it has the documents of the lines that begin in that range. A .txt file
that is one document is a single part, and so is a compressed file.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader

from training.untrusted import open_plain

MOST = 1 << 30  # bytes of one document, and of one line: a small .gz may hold any number


@dataclass(frozen=True)
class Shard:
    """The lines of a file that begin in bytes `begin` to `end`; `end` None is the whole file."""

    path: str
    begin: int
    end: int | None

    @property
    def size(self) -> int:
        """Return the number of bytes in this part."""
        return (os.path.getsize(self.path) if self.end is None else self.end) - self.begin

    def texts(self, key: str, lines: bool) -> Iterator[tuple[int | None, str]]:
        """Yield (line number for `place`, text) of each document.

        A document is `key` of a line of a .jsonl, a whole .txt, or with `lines` a line of a .txt.
        Raises ValueError with file and line where there is no such text.
        """
        kind = kind_of(self.path)
        try:
            if kind == "txt" and not lines:
                with _open(self.path) as file:
                    yield None, self._decode(None, self._within(None, file.read(MOST + 1)))
                return
            for number, raw in self._lines():
                text = self._decode(number, raw)
                if kind == "txt":
                    yield number, text.rstrip("\r\n")
                elif text.strip():
                    yield number, self._value(number, text, key)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{self.path}: cannot be read ({error})") from error

    def place(self, number: int | None) -> str:
        """Return "file, line n" for the n-th line of this part."""
        if number is None:
            return self.path
        if self.begin:
            number += 1  # the line that belongs to the part before
            with _open(self.path) as file:
                left = self.begin - 1
                while left > 0 and (block := file.read(min(left, 1 << 24))):
                    number += block.count(b"\n")
                    left -= len(block)
        return f"{self.path}, line {number}"

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with _open(self.path) as file:
            if self.begin:
                file.seek(self.begin - 1)
                file.readline()  # the line that began before belongs to the part before
            number = 0
            while self.end is None or file.tell() < self.end:
                line = file.readline(MOST + 1)
                if not line:
                    return
                number += 1
                yield number, self._within(number, line)

    def _within(self, number: int | None, raw: bytes) -> bytes:
        if len(raw) > MOST:
            raise ValueError(f"{self.place(number)}: a document of more than {MOST:,} bytes")
        return raw

    def _decode(self, number: int | None, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.place(number)}: not UTF-8 ({error.reason})") from error

    def _value(self, number: int, text: str, key: str) -> str:
        try:
            value = json.loads(text)[key]
            if "\\u" in text:
                value.encode()  # half of a surrogate pair is no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            value = None
        if not isinstance(value, str):
            raise ValueError(f"{self.place(number)}: no JSON object with a text {key!r}")
        return value


def cut_files(paths: Sequence[str], lines: bool, size: int) -> list[Shard]:
    """Cut files into parts of `size` bytes, in order."""
    shards = []
    for path in paths:
        if path.endswith(".gz") or (kind_of(path) == "txt" and not lines):
            shards.append(Shard(path, 0, None))
        else:
            end = os.path.getsize(path)
            shards += [Shard(path, i, min(i + size, end)) for i in range(0, end, size)]
    return shards


def documents(path: str | os.PathLike[str], key: str = "text") -> Iterator[str]:
    """Yield the documents of one file: a whole .txt, or `key` of each line of a .jsonl."""
    for _, text in Shard(os.fspath(path), 0, None).texts(key, lines=False):
        yield text


def kind_of(path: str) -> str:
    """Return "txt" or "jsonl"; raise ValueError for other names."""
    kind = path.removesuffix(".gz").rpartition(".")[2]
    if kind not in ("txt", "jsonl"):
        raise ValueError(f"{path}: neither .txt nor .jsonl, nor one of them with .gz")
    return kind


def _open(path: str) -> gzip.GzipFile | BufferedReader:
    file = open_plain(path)
    return gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
