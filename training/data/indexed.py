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
one sequence per document, so the rest of this package says document.
"""

import hashlib
import mmap
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

from training.data.files import replacing

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
BLOCK = 1 << 20  # sequences checked at a time


def token_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron's token type for a vocabulary: uint16 below 65,500 tokens, else int32."""
    return TOKEN_TYPES[8] if vocab_size < 65500 else TOKEN_TYPES[4]


class IndexedTokens:
    """Read one `.bin`/`.idx` pair by memory maps, after a check that the two agree.

    `lengths[i]` and `pointers[i]` describe sequence i, `tokens` is the whole `.bin` as one array.
    Raises ValueError naming the file and the field when the pair is damaged or missing.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        index = _map(prefix, ".idx")
        self.dtype, n, m = self._read_header(index)
        ends = np.cumsum([HEADER.size, 4 * n, 8 * n, 8 * m])
        self.lengths = index[ends[0] : ends[1]].view("<i4")
        self.pointers = index[ends[1] : ends[2]].view("<i8")
        self.document_indices = index[ends[2] : ends[3]].view("<i8")
        data = _map(prefix, ".bin")
        self._check_sequences(len(data))
        self._check_documents()
        self.tokens = data.view(self.dtype)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def read(self, sequence: int, offset: int, count: int) -> np.ndarray:
        """Return `count` tokens of a sequence, from token `offset` on, as a view of the file."""
        assert 0 <= offset and offset + count <= self.lengths[sequence]
        first = int(self.pointers[sequence]) // self.dtype.itemsize + offset
        return self.tokens[first : first + count]

    @cached_property
    def digest(self) -> str:
        """Return a SHA-256 of every length and of 64 blocks of tokens: the file's identity.

        A copied file keeps its digest: neither path nor time is part of it.
        """
        facts = hashlib.sha256(f"{self.dtype.str} {len(self)} {len(self.tokens)}".encode())
        for first in range(0, len(self), BLOCK):
            facts.update(self.lengths[first : first + BLOCK].tobytes())
        for block in self._probes():
            facts.update(block.tobytes())
        return facts.hexdigest()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError where one of 64 blocks of the file has ids outside the vocabulary."""
        found = [
            edge for block in self._probes() if block.size for edge in (block.min(), block.max())
        ]
        if found and (min(found) < 0 or max(found) >= vocab_size):
            self._refuse(
                "tokens",
                f"ids from {min(found)} to {max(found)} are not those of a vocabulary of "
                f"{vocab_size}; was the file made with this tokenizer?",
                suffix=".bin",
            )

    def _probes(self) -> list[np.ndarray]:
        firsts = np.linspace(0, max(len(self.tokens) - 2048, 0), 64).astype(np.int64)
        return [self.tokens[first : first + 2048] for first in firsts]

    def _refuse(self, field: str, why: str, suffix: str = ".idx") -> NoReturn:
        raise ValueError(f"{self.prefix}{suffix}: {field}: {why}")

    def _read_header(self, index: np.ndarray) -> tuple[np.dtype, int, int]:
        """Return token type, n and m, checked against the size of the file."""
        if len(index) < HEADER.size:
            self._refuse("header", f"the file has {len(index)} bytes, a header takes {HEADER.size}")
        magic, version, code, n, m = HEADER.unpack(index[: HEADER.size].tobytes())
        if magic != MAGIC:
            self._refuse("magic", f"{magic!r} is not {MAGIC!r}: this is not a Megatron index")
        if version != 1:
            self._refuse("version", f"{version} is not 1")
        if code not in TOKEN_TYPES:
            self._refuse("token type", f"code {code} is none of {sorted(TOKEN_TYPES)}")
        size = HEADER.size + 12 * n + 8 * m
        if len(index) not in (size, size + n):
            self._refuse(
                "counts",
                f"{n} sequences and {m} document indices take {size} bytes, "
                f"the file has {len(index)}",
            )
        return TOKEN_TYPES[code], n, m

    def _check_sequences(self, bin_size: int) -> None:
        """Refuse negative lengths, and sequences that do not fill the .bin without a gap."""
        end = 0  # stays below bin_size + BLOCK * 2**31 * 8: no overflow
        for first in range(0, len(self), BLOCK):
            lengths = self.lengths[first : first + BLOCK].astype(np.int64)
            if lengths.min() < 0:
                bad = int(np.argmax(lengths < 0))
                self._refuse("lengths", f"sequence {first + bad} has length {lengths[bad]}")
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            starts = np.concatenate(([end], ends[:-1]))
            pointers = self.pointers[first : first + BLOCK]
            if not np.array_equal(pointers, starts):
                bad = int(np.argmax(pointers != starts))
                self._refuse(
                    "pointers",
                    f"sequence {first + bad} starts at byte {pointers[bad]}, "
                    f"the lengths before it say {starts[bad]}",
                )
            end = int(ends[-1])
            if end > bin_size:
                break
        if end != bin_size:
            self._refuse(
                "size", f"{bin_size} bytes, but the lengths in the .idx need {end}", suffix=".bin"
            )

    def _check_documents(self) -> None:
        """Refuse document indices that do not climb from 0 to the number of sequences."""
        indices = self.document_indices
        if len(indices) == 0:
            self._refuse("document indices", "there is none, not even the first 0")
        if indices[0] != 0:
            self._refuse("document indices", f"they start at {indices[0]}, not at 0")
        if indices[-1] != len(self):
            self._refuse(
                "document indices", f"they end at {indices[-1]}, not at {len(self)} sequences"
            )
        for first in range(0, len(indices), BLOCK):
            if np.any(np.diff(indices[first : first + BLOCK + 1]) < 0):
                self._refuse("document indices", f"they fall after entry {first}")


class IndexedWriter:
    """Write one `.bin`/`.idx` pair; both files appear, complete, when the `with` block succeeds.

    A block that raises leaves existing files as they were. Raises ValueError for a token outside
    the range of the type.
    """

    def __init__(self, prefix: str, dtype: np.dtype) -> None:
        self.prefix = prefix
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
        with open(prefix + ".bin", "rb") as source:
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


def _map(prefix: str, suffix: str) -> np.ndarray:
    """Return a file's bytes as a read-only memory map."""
    try:
        with open(prefix + suffix, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return np.empty(0, np.uint8)  # an empty file cannot be mapped
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        hint = ""
        if prefix.endswith((".bin", ".idx")):
            hint = "; give the path without .bin or .idx"
        raise ValueError(f"{prefix}{suffix}: cannot be read: {error.strerror}{hint}") from error
