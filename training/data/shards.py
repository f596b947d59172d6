# SPDX-License-Identifier: Apache-2.0
"""Read a part of a text file, so that several processes can read one file.

A part is a range of bytes and has the documents of the lines that begin in it. A .txt file that is
one document is a single part, and so are a compressed file and a .parquet.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from training.data.bad_documents import BadDocuments
from training.data.parquet import rows
from training.data.text_files import PACKED, ending_of, kind_of, opened

BLOCK = 1 << 24  # bytes of a read of what is not kept
MOST = 1 << 30  # bytes of one document, and of one line: a small .gz may hold any number
BOM = b"\xef\xbb\xbf"  # which some editors put before UTF-8; `cat` leaves it before a line


class Where(NamedTuple):
    """A place in a part: the line or row, from 1 (0: the file is one document), and the byte.

    The byte is counted from the start of the file, or of its text if compressed; 0 for a row.
    """

    line: int
    byte: int


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

    def texts(
        self,
        key: str,
        lines: bool,
        bad: BadDocuments | None = None,
        report: Callable[[int], object] = int,
    ) -> Iterator[tuple[Where, str]]:
        """Yield (where, text) of each document that has text.

        A document is `key` of a line of a .jsonl or of a row of a .parquet, a whole .txt, or with
        `lines` a line of a .txt that is not blank. bad: counts or refuses those that cannot be
        read. report: called with the number of bytes of the file read since the last call. Raises
        ValueError with file, line and byte.
        """
        bad = bad or BadDocuments()
        for where, (text,) in self.texts_of((key,), lines, bad, report):
            if text:
                yield where, text
            else:
                bad.found("empty", partial(self.place, where), "an empty document")

    def texts_of(
        self,
        keys: Sequence[str],
        lines: bool,
        bad: BadDocuments,
        report: Callable[[int], object] = int,
    ) -> Iterator[tuple[Where, tuple[str, ...]]]:
        """Yield (where, the texts of all keys) of each document as `texts` does, also empty ones.

        A .txt has one text, whatever the key.
        """
        kind = kind_of(self.path)
        try:
            with opened(self.path) as (file, raw):
                last = 0
                for where, found in self._documents(file, keys, lines, kind, bad):
                    before, last = last, raw.tell()
                    report(last - before)
                    texts = self._decode(where, found, bad)
                    if kind == "jsonl" and texts is not None:
                        (text,) = texts
                        texts = self._values(where, text, keys, bad) if text.strip() else None
                    elif kind == "txt" and lines and texts is not None:
                        texts = tuple(text.rstrip("\r\n") for text in texts)
                        texts = texts if any(map(str.strip, texts)) else None
                    if texts is not None:
                        yield where, texts
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{self.path}: cannot be read ({error})") from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("zstd", "zstandard", "pyarrow"):
                raise
            raise ValueError(f"{self.path}: cannot be read ({error})") from error

    def place(self, where: Where) -> str:
        """Return "file, line n, byte o" for a place in this part."""
        number = where.line
        if number == 0:
            return self.path + (f", byte {where.byte}" if where.byte else "")
        if kind_of(self.path) == "parquet":
            return f"{self.path}, row {number}"
        if self.begin:
            number += 1  # the line that belongs to the previous part
            with opened(self.path) as (file, _):
                left = self.begin - 1
                while left > 0 and (block := file.read(min(left, BLOCK))):
                    number += block.count(b"\n")
                    left -= len(block)
        return f"{self.path}, line {number}, byte {where.byte}"

    def _documents(
        self, file: BinaryIO, keys: Sequence[str], lines: bool, kind: str, bad: BadDocuments
    ) -> Iterator[tuple[Where, tuple[bytes | None, ...]]]:
        """Yield the bytes of each line, of each row's texts, or of the whole file."""
        if kind == "parquet":
            for number, values in rows(self.path, file, keys):
                yield Where(number, 0), values
        elif kind == "txt" and not lines:
            raw = file.read(MOST + 1)
            if len(raw) > MOST:
                bad.found("too long", lambda: self.path, TOO_LONG.format(MOST))
            else:
                where, raw = _text_of(Where(0, 0), raw)
                yield where, (raw,)
        else:
            for where, raw in self._lines(file, bad):
                yield where, (raw,)

    def _lines(self, file: BinaryIO, bad: BadDocuments) -> Iterator[tuple[Where, bytes]]:
        at, number = self.begin, 0
        if self.begin:
            file.seek(self.begin - 1)  # a line that began earlier belongs to the previous part
            at = self._behind_line(file, self.begin - 1)
        while self.end is None or at < self.end:
            line = file.readline(MOST + 1)
            if not line:
                return
            number += 1
            where, at = Where(number, at), at + len(line)
            if len(line) <= MOST:
                yield _text_of(where, line)
                continue
            bad.found("too long", partial(self.place, where), TOO_LONG.format(MOST))
            if not line.endswith(b"\n"):
                at = self._behind_line(file, at)

    def _behind_line(self, file: BinaryIO, at: int) -> int:
        """Return where the line at byte `at` ends, or a byte behind this part's end before that."""
        while line := file.readline(BLOCK):
            at += len(line)
            if line.endswith(b"\n") or (self.end is not None and at >= self.end):
                break
        return at

    def _decode(
        self, where: Where, raws: Sequence[bytes | None], bad: BadDocuments
    ) -> tuple[str, ...] | None:
        found, raw = list[str](), b""
        try:
            for each in raws:
                if each is None:
                    kind = "without a text, but null"
                    bad.found(kind, partial(self.place, where), "null in place of a text")
                    return None
                raw = each
                found.append(raw.decode("utf-8"))
            return tuple(found)
        except UnicodeDecodeError as error:
            line = where.line or 1 + raw.count(b"\n", 0, error.start)
            at, why = Where(line, where.byte + error.start), f"not UTF-8 ({error.reason})"
            bad.found("not UTF-8", partial(self.place, at), why)
            return None

    def _values(
        self, where: Where, text: str, keys: Sequence[str], bad: BadDocuments
    ) -> tuple[str, ...] | None:
        kind, key, value = "without a text", keys[0], ""
        try:
            found = json.loads(text)
            for key in keys:
                if type(value := found[key]) is not str:
                    break
                if "\\u" in text:
                    value.encode()  # half of a surrogate pair is no text
            else:
                return tuple(found[key] for key in keys)
            kind += f", but {_json_type(value)}"
            why = f"{key!r} is {_json_type(value)}"
        except json.JSONDecodeError as error:
            kind, why = "not JSON", error.msg
            where = Where(where.line, where.byte + len(text[: error.pos].encode()))
        except UnicodeEncodeError as error:
            kind += ", but half of a surrogate pair"
            half = f"\\u{ord(value[error.start]):x}"
            why = f"{key!r} has half of a surrogate pair, {half}, after {error.start:,} characters"
        except KeyError:
            keys = ", ".join(map(repr, list(found)[:9])) or "no key"
            why = f"it has {keys}; --json-keys names the key (of make train: JSON_KEYS)"
        except TypeError:
            why = f"the line is {_json_type(found)}"
        except (ValueError, RecursionError) as error:
            why = "too many levels" if isinstance(error, RecursionError) else str(error)
        rule = f"no JSON object with a text {key!r} ({why})"
        bad.found(kind, partial(self.place, where), rule)
        return None


def _json_type(value: Any) -> str:
    """Return the type of a value of JSON, in words."""
    words = {bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return (words | {dict: "an object", str: "a string"}).get(type(value), "null")


def _text_of(where: Where, raw: bytes) -> tuple[Where, bytes]:
    """Return a line or file without its byte order mark, and the place where it begins."""
    if raw.startswith(BOM):
        return Where(where.line, where.byte + len(BOM)), raw[len(BOM) :]
    return where, raw


TOO_LONG = "a document of more than {:,} bytes"


def cut_files(paths: Sequence[str], lines: bool, size: int) -> list[Shard]:
    """Cut files into parts of `size` bytes, in order."""
    shards = []
    for path in paths:
        kind = kind_of(path)
        if ending_of(path) in PACKED or kind == "parquet" or (kind == "txt" and not lines):
            shards.append(Shard(path, 0, None))
        else:
            end = os.path.getsize(path)
            shards += [Shard(path, i, min(i + size, end)) for i in range(0, end, size)]
    return shards


def keys_of(path: str | os.PathLike[str], keys: Sequence[str]) -> Sequence[str]:
    """Return the keys whose texts differ in a file: a .txt has one text, whatever the key."""
    return keys[:1] if kind_of(os.fspath(path)) == "txt" else keys


def documents(
    path: str | os.PathLike[str],
    key: str = "text",
    bad: BadDocuments | None = None,
    report: Callable[[int], object] = int,
    lines: bool = False,
) -> Iterator[str]:
    """Yield the documents of one file, as `Shard.texts` does."""
    for _, text in Shard(os.fspath(path), 0, None).texts(key, lines, bad, report):
        yield text
