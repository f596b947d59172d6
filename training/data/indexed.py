# SPDX-License-Identifier: Apache-2.0
"""Read and write tokens on disk: the `.bin`/`.idx` pair of Megatron, byte for byte.

`PREFIX.bin` holds only tokens. `PREFIX.idx`, little-endian, holds where sequences start and end:

    offset  0   9 bytes  magic "MMIDIDX\\0\\0"
            9   u64      version, 1
           17   u8       token type: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16
           18   u64      n, the number of sequences
           26   u64      m, the number of document indices
           34   i32[n]   length of each sequence, in tokens
                i64[n]   byte at which each sequence starts in the .bin
                i64[m]   first sequence of each document, then n
                i8[n]    modes (optional, multimodal files only; not used here)

As in Megatron, training cuts samples out of *sequences*; files made for pretraining hold exactly
one sequence per document, so the rest of this package calls them documents.
"""

import hashlib
import json
import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import BinaryIO, NoReturn

import numpy as np
import xxhash

from training.data.cache import IndexCache
from training.data.files import replacing, write_text
from training.data.identity import full_digest
from training.data.made_with import Record, facts_of, is_record
from training.data.watched import WatchedFile
from training.files.untrusted import open_plain

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
BLOCK = 1 << 20  # sequences checked at a time, a multiple of STRIDE
MOST = (1 << 31) - 1  # sequences of a file
WHOLE = 1 << 32  # bytes: a larger file is not reread as a whole to see whether it changed
STRIDE, MANY = 8, 1 << 24  # from MANY sequences on, only every STRIDE-th start is kept


def token_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron's token type for a vocabulary: uint16 below 65,500 tokens, else int32."""
    return TOKEN_TYPES[8] if vocab_size < 65500 else TOKEN_TYPES[4]


class IndexedTokens:
    """Read one `.bin`/`.idx` pair, after a check that the two agree; threads may share it.

    `lengths[i]` is the length of sequence i in tokens, `count` the number of all tokens. The index
    takes 12 bytes of memory per sequence, 5 if there are many; tokens are read on demand. `cache`
    keeps `digest`. Raises ValueError naming the file and the field if the pair is damaged or
    missing.
    """

    def __init__(self, prefix: str, cache: IndexCache | None = None) -> None:
        self.prefix = prefix
        self._cache = cache
        index, self._bin = _open(prefix, ".idx"), _open(prefix, ".bin")
        self.dtype, n, m = self._read_header(index)
        self.count = self._bin.size // self.dtype.itemsize
        self.lengths = np.empty(n, "<i4")
        index.fill(self.lengths, HEADER.size)
        self._stride = 1 if n < MANY else STRIDE
        self._starts = np.empty(-(-n // self._stride), np.int64)  # first token of every _stride-th
        self._check_sequences(index)
        self._check_documents(index, HEADER.size + 12 * n, m)
        index.check()
        self._stamps = {"bin": self._bin.stamp, "idx": index.stamp}
        index.close()

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    @property
    def owner(self) -> int:
        """Return the id of the user who owns the .bin."""
        return self._bin.owner

    @property
    def tokens(self) -> np.ndarray:
        """Return all tokens, read now."""
        return self._tokens(0, self.count)

    @property
    def document_indices(self) -> np.ndarray:
        """Return the first sequence of each document, then n, int64 [m], read now."""
        index = _open(self.prefix, ".idx")
        _, n, m = self._read_header(index)
        found = np.empty(m, "<i8")
        index.fill(found, HEADER.size + 12 * n)
        return found

    def read(self, sequence: int, offset: int, count: int) -> np.ndarray:
        """Return `count` tokens of a sequence, from token `offset` on.

        Raises DataError if the file does not hold them any more. check() detects whether it was
        written to meanwhile.
        """
        assert 0 <= offset and offset + count <= self.lengths[sequence]
        return self._tokens(self._first(sequence) + offset, count)

    def holds_only(self, token: int | None, sequences: range) -> bool:
        """Return whether consecutive sequences hold no other token; read up to the first other.

        True if they are empty.
        """
        at = self._first(sequences.start) if sequences else 0
        end = at + int(self.lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        size = 2048
        while at < end:
            if (self._tokens(at, min(size, end - at)) != token).any():
                return False
            at, size = at + size, min(2 * size, BLOCK)
        return True

    def occurrences(self, token: int) -> int:
        """Return the number of occurrences of a token in the file, read now."""
        blocks = (
            self._tokens(at, min(BLOCK, self.count - at)) for at in range(0, self.count, BLOCK)
        )
        return sum(int(np.count_nonzero(block == token)) for block in blocks)

    def check(self) -> None:
        """Raise DataError if the tokens were written to, or truncated, since they were opened.

        If only the file's ctime changed, its tokens are compared: all of them if `digest` is known
        and the file has at most WHOLE bytes, else those of `sketch`. The next start compares all.
        """
        self._bin.check(self._same_tokens)

    def under_way(self) -> str:
        """Return the file and the byte of the longest read in progress, or ""."""
        return self._bin.under_way()

    @cached_property
    def digest(self) -> str:
        """Return an XXH3-128 of every length and every token: the file's identity.

        A copied file keeps its digest: neither path nor time is part of it. It is computed once
        and then found in the cache, as long as both files keep their sizes and times.
        """
        facts = {"identity": 1, "name": os.path.basename(self.prefix), **self._stamps}
        found = full_digest(self._bin, self.lengths, self.dtype.str, facts, self._cache)
        self.check()
        return found

    @cached_property
    def sketch(self) -> str:
        """Return a SHA-256 of every length and of 64 blocks of tokens, as in older checkpoints."""
        return self._sketch()

    def _sketch(self) -> str:
        facts = hashlib.sha256(f"{self.dtype.str} {len(self)} {self.count}".encode())
        for first in range(0, len(self), BLOCK):
            facts.update(self.lengths[first : first + BLOCK].tobytes())
        for block in self._probes():
            facts.update(block.tobytes())
        return facts.hexdigest()

    @property
    def probe(self) -> str:
        """Return an XXH3-128 of the number of tokens and 64 blocks of them, whatever their type."""
        return self._blocks[0]

    @cached_property
    def _blocks(self) -> tuple[str, list[int]]:
        """Return `probe`, and the least and the greatest id of each block."""
        found, edges = xxhash.xxh3_128(f"{self.count}".encode()), list[int]()
        for block in self._probes():
            found.update(block.astype("<i8").data)
            edges += [int(block.min()), int(block.max())] if block.size else []
        return found.hexdigest(), edges

    def holds_tokens_of(self, other: "IndexedTokens") -> bool:
        """Return whether another file has the same tokens, whatever their types and documents."""
        parts = ((at, min(BLOCK, self.count - at)) for at in range(0, self.count, BLOCK))
        return self.count == other.count and all(
            np.array_equal(self._tokens(*part), other._tokens(*part)) for part in parts
        )

    @property
    def range_of_ids(self) -> tuple[int, int]:
        """Return the least and the greatest id of 64 blocks; (0, 0) for a file without tokens."""
        _, found = self._blocks
        return min(found, default=0), max(found, default=0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if one of 64 blocks of the file has ids outside the vocabulary."""
        least, greatest = self.range_of_ids
        if self.count and (least < 0 or greatest >= vocab_size):
            self._refuse(
                "tokens",
                f"ids from {least} to {greatest} are not those of a vocabulary of "
                f"{vocab_size}; was the file made with this tokenizer?",
                suffix=".bin",
            )

    def _same_tokens(self) -> bool:
        """Return whether the file still has the tokens of `digest`, or else those of `sketch`."""
        if "digest" in self.__dict__ and self._bin.size <= WHOLE:
            return full_digest(self._bin, self.lengths, self.dtype.str, {}, None) == self.digest
        return self._sketch() == self.sketch

    def _first(self, sequence: int) -> int:
        """Return the index of a sequence's first token among all tokens."""
        first = int(self._starts[sequence // self._stride])
        if rest := sequence % self._stride:
            first += sum(self.lengths[sequence - rest : sequence].tolist())
        return first

    def _tokens(self, first: int, count: int) -> np.ndarray:
        width = self.dtype.itemsize
        return np.frombuffer(self._bin.read(first * width, count * width), self.dtype)

    def _probes(self) -> list[np.ndarray]:
        firsts = np.linspace(0, max(self.count - 2048, 0), 64).astype(np.int64)
        return [self._tokens(int(first), min(2048, self.count)) for first in firsts]

    def _refuse(self, field: str, why: str, suffix: str = ".idx") -> NoReturn:
        raise ValueError(f"{self.prefix}{suffix}: {field}: {why}")

    def _read_header(self, index: WatchedFile) -> tuple[np.dtype, int, int]:
        """Return token type, n and m, checked against the size of the file."""
        if index.size < HEADER.size:
            self._refuse("header", f"the file has {index.size} bytes, a header takes {HEADER.size}")
        magic, version, code, n, m = HEADER.unpack(index.read(0, HEADER.size))
        if magic != MAGIC:
            self._refuse("magic", f"{magic!r} is not {MAGIC!r}: this is not a Megatron index")
        if version != 1:
            self._refuse("version", f"{version} is not 1")
        if code not in TOKEN_TYPES:
            self._refuse("token type", f"code {code} is none of {sorted(TOKEN_TYPES)}")
        size = HEADER.size + 12 * n + 8 * m
        if index.size not in (size, size + n):
            self._refuse(
                "counts",
                f"{n} sequences and {m} document indices take {size} bytes, "
                f"the file has {index.size}",
            )
        if n > MOST:
            self._refuse(
                "counts", f"{n} sequences are more than {MOST}, which are numbered in int32"
            )
        return TOKEN_TYPES[code], n, m

    def _check_sequences(self, index: WatchedFile) -> None:
        """Raise ValueError for negative lengths, or sequences that do not fill the .bin exactly."""
        end, width = 0, self.dtype.itemsize  # end < bin size + BLOCK * 2**31 * 8: no overflow
        for first in range(0, len(self), BLOCK):
            lengths = self.lengths[first : first + BLOCK].astype(np.int64)
            if lengths.min() < 0:
                bad = int(np.argmax(lengths < 0))
                self._refuse("lengths", f"sequence {first + bad} has length {lengths[bad]}")
            ends = end + np.cumsum(lengths) * width
            starts = np.concatenate(([end], ends[:-1]))
            pointers = np.empty(len(lengths), "<i8")
            index.fill(pointers, HEADER.size + 4 * len(self) + 8 * first)
            if not np.array_equal(pointers, starts):
                bad = int(np.argmax(pointers != starts))
                self._refuse(
                    "pointers",
                    f"sequence {first + bad} starts at byte {pointers[bad]}, "
                    f"the lengths before it say {starts[bad]}",
                )
            some, at = starts[:: self._stride] // width, first // self._stride
            self._starts[at : at + len(some)] = some
            end = int(ends[-1])
            if end > self._bin.size:
                break
        if end != self._bin.size:
            self._refuse(
                "size",
                f"{self._bin.size} bytes, but the lengths in the .idx need {end}",
                suffix=".bin",
            )

    def _check_documents(self, index: WatchedFile, at: int, count: int) -> None:
        """Raise ValueError unless document indices increase from 0 to the number of sequences."""
        last = 0
        for first in range(0, count, BLOCK):
            indices = np.empty(min(BLOCK, count - first), "<i8")
            index.fill(indices, at + 8 * first)
            if first == 0 and indices[0] != 0:
                self._refuse("document indices", f"they start at {indices[0]}, not at 0")
            if indices[0] < last or np.any(indices[1:] < indices[:-1]):
                self._refuse("document indices", f"they fall after entry {max(first - 1, 0)}")
            last = int(indices[-1])
        if count == 0:
            self._refuse("document indices", "there is none, not even the first 0")
        if last != len(self):
            self._refuse("document indices", f"they end at {last}, not at {len(self)} sequences")


class IndexedWriter:
    """Write one `.bin`/`.idx` pair; both files appear, complete, when the `with` block succeeds.

    record: that of the tokenizer (training/data/made_with.py), written to PREFIX.json before the
    index.
    A block that raises leaves existing files as they were. Raises ValueError for a token outside
    the range of the type.
    """

    def __init__(self, prefix: str, dtype: np.dtype, record: Record | None = None) -> None:
        self.prefix, self.record = prefix, record
        self.dtype = np.dtype(dtype)
        self._code = {kind: code for code, kind in TOKEN_TYPES.items()}[self.dtype]
        self._range = np.iinfo(self.dtype)
        self._lengths = array("i")
        self._documents = array("q", [0])

    def __enter__(self) -> "IndexedWriter":
        os.makedirs(os.path.dirname(self.prefix) or ".", exist_ok=True)
        self._opened = replacing(self.prefix + ".bin")
        self._bin = self._opened.__enter__()
        return self

    @property
    def documents(self) -> int:
        """Return the number of documents written so far."""
        return len(self._documents) - 1

    @property
    def tokens(self) -> int:
        """Return the number of tokens written so far."""
        return self._bin.tell() // self.dtype.itemsize

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document, as one sequence."""
        wide = np.asarray(tokens, dtype=np.int64)
        if wide.size and (wide.min() < self._range.min or wide.max() > self._range.max):
            raise ValueError(
                f"{self.prefix}.bin: document {self.documents} holds token ids from "
                f"{wide.min()} to {wide.max()}, outside of {self.dtype.name}"
            )
        self._bin.write(wide.astype(self.dtype).tobytes())
        self._lengths.append(wide.size)
        self._documents.append(len(self._lengths))

    def add_file(self, prefix: str) -> None:
        """Append every document of another pair of the same token type."""
        part = IndexedTokens(prefix)
        if part.dtype != self.dtype:
            raise ValueError(f"{prefix}.idx: token type: {part.dtype} is not {self.dtype}")
        base = len(self._lengths)
        self._lengths.frombytes(part.lengths.tobytes())
        self._documents.frombytes((part.document_indices[1:] + base).tobytes())
        with open_plain(prefix + ".bin") as source:
            shutil.copyfileobj(source, self._bin, 1 << 22)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            with suppress(FileNotFoundError):
                os.unlink(self.prefix + ".idx")  # an old index must never meet the new tokens
        self._opened.__exit__(kind, error, trace)
        if kind is None and self.record is not None:
            about = {**self.record, **facts_of(np.frombuffer(self._lengths, dtype=np.int32))}
            write_text(self.prefix + ".json", json.dumps(about, indent=1) + "\n", is_record)
        if kind is None:
            with replacing(self.prefix + ".idx") as file:
                self._write_index(file)

    def _write_index(self, file: BinaryIO) -> None:
        n, m = len(self._lengths), len(self._documents)
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        file.write(HEADER.pack(MAGIC, 1, self._code, n, m))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths * np.int64(self.dtype.itemsize)).astype("<i8").tobytes())
        file.write(np.frombuffer(self._documents, dtype=np.int64).astype("<i8").tobytes())


def _open(prefix: str, suffix: str) -> WatchedFile:
    try:
        return WatchedFile(prefix + suffix)
    except OSError as error:
        hint = ""
        if prefix.endswith((".bin", ".idx")):
            hint = "; give the path without .bin or .idx"
        raise ValueError(f"{prefix}{suffix}: cannot be read: {error.strerror}{hint}") from error
