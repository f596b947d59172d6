# SPDX-License-Identifier: Apache-2.0
"""Cut documents into training samples, in an order that depends on the data and the seed only.

The stream of tokens is endless: epoch 0, epoch 1, ..., each with every document of the split once,
in an order of its own. Cut i takes tokens i * s to i * s + s of the stream (s inputs and, shifted
by one, s labels), across documents and, at the end of an epoch, into the next one; no token is
dropped. The samples are the cuts, shuffled among those that start in the same epoch. Their order
does not depend on how many a run takes: a longer run begins with the same samples.
"""

import ctypes
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from training.data.batch import PAD
from training.data.cache import IndexCache
from training.data.dataset import FULL_DIGEST, DataError
from training.data.indexed import IndexedTokens
from training.data.loss_mask import LossMask
from training.data.sample_index import sample_index

CACHE_FROM = 4096  # entries; building a smaller index is faster than reading it
EPOCHS_CACHED = 4
Piece = tuple[int, int, int]  # (document, first token in it, number of tokens)


class Epoch(NamedTuple):
    """The order of one epoch: its documents, the start of each sample, the shuffle of samples."""

    documents: np.ndarray  # int32 [documents]
    starts: np.ndarray  # int32 [samples, 2]: place in `documents`, offset in tokens
    shuffle: np.ndarray  # int32 [samples]


class GPTDataset:
    """The endless, shuffled samples of a range of documents of one file, and of its loss mask.

    Raises ValueError if the range has no tokens; sample() raises DataError if the file was changed
    since it was opened.
    """

    length = None  # endless

    def __init__(
        self,
        data: IndexedTokens,
        split: str,
        documents: range,
        seq_length: int,
        seed: int,
        cache: IndexCache,
        library: ctypes.CDLL | None = None,
        loss_mask: LossMask | None = None,
    ) -> None:
        self.name = data.prefix
        self.seq_length = seq_length
        self.tokens = int(data.lengths[documents.start : documents.stop].sum(dtype=np.int64))
        if self.tokens == 0:
            raise ValueError(f"{data.prefix}: the {split} split has no tokens")
        self._data, self._mask = data, loss_mask
        self.masked = loss_mask is not None
        self._documents = documents
        self._cache = cache
        self._library = library
        self._facts = {
            "format": 1,
            "data": data.sketch,  # an index depends on the lengths alone
            "split": split,
            "documents": [documents.start, documents.stop],
            "seq_length": seq_length,
            "seed": seed,
        }
        self._epochs: dict[int, Epoch] = {}
        self._lock = threading.Lock()

    @property
    def digest(self) -> str:
        """Return a SHA-256 of everything that decides which tokens sample i holds."""
        return _sha256({**self._facts, **self._identity()})

    @property
    def corpus(self) -> str:
        """Return a SHA-256 of the data and how it is cut: `digest` without the seed."""
        facts = {key: value for key, value in self._facts.items() if key != "seed"}
        return FULL_DIGEST + _sha256({**facts, **self._identity()})

    @property
    def sketch(self) -> str:
        """Return the corpus digest of older checkpoints, which covers 64 blocks of the file."""
        facts = {key: value for key, value in self._facts.items() if key != "seed"}
        return _sha256(facts if self._mask is None else {**facts, "loss_mask": self._mask.sketch})

    def _identity(self) -> dict[str, object]:
        """Return the digests of every token, and of every value of the mask."""
        mask = {} if self._mask is None else {"loss_mask": self._mask.digest}
        return {"data": self._data.digest, **mask}

    def sample(self, i: int) -> np.ndarray:
        """Return the tokens of sample i, int64 [seq_length + 1]."""
        out = np.empty(self.seq_length + 1, np.int64)
        _fill(out, self._pieces(i), self._data.read)
        self._data.check()  # after the reads, so that it finds a change before or during them
        return out

    def loss_mask(self, i: int) -> np.ndarray:
        """Return which tokens of sample i count in the loss, bool [seq_length + 1]."""
        return self._counted(self._pieces(i))

    def _counted(self, pieces: Iterable[Piece]) -> np.ndarray:
        """Return the loss mask of pieces, bool [seq_length + 1]; False after the last one."""
        if self._mask is None:
            return np.ones(self.seq_length + 1, bool)
        out = np.zeros(self.seq_length + 1, bool)
        _fill(out, pieces, self._mask.read)
        self._mask.check()
        return out

    def _pieces(self, i: int) -> Iterator[Piece]:
        """Yield the pieces of documents that make up sample i."""
        epoch, place, offset = self._start(i)
        left = self.seq_length + 1
        while left:
            documents = self._epoch(epoch).documents
            for document in documents[place:]:
                count = min(int(self._data.lengths[document]) - offset, left)
                yield document, offset, count
                left, offset = left - count, 0
                if not left:
                    break
            epoch, place = epoch + 1, 0

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (0, document, offset) of the first token of sample i."""
        epoch, place, offset = self._start(i)
        return 0, int(self._epoch(epoch).documents[place]), offset

    def describe(self, i: int) -> str:
        """Return where sample i comes from, as text for an error message."""
        _, document, offset = self.origin(i)
        return f"{self.name}: document {document}, from token {offset} on"

    def under_way(self) -> str:
        """Return the file and the byte of the longest read in progress, or ""."""
        return self._data.under_way() or (self._mask.under_way() if self._mask else "")

    def place_in_order(self, i: int) -> tuple[int, int]:
        """Return (document, offset) of token i * seq_length in the order of the file."""
        first = i * self.seq_length
        place = int(np.searchsorted(self._ends, first, side="right"))
        return self._documents[place], first - (int(self._ends[place - 1]) if place else 0)

    def in_order(self, i: int) -> np.ndarray:
        """Return tokens i * seq_length to (i + 1) * seq_length in the order of the file, once.

        int64 [seq_length + 1], PAD after the last token. Raises DataError for a negative token.
        """
        out = np.full(self.seq_length + 1, PAD, np.int64)

        def read(document: int, offset: int, count: int) -> np.ndarray:
            found = self._data.read(document, offset, count)
            if count and found.min() < 0:
                raise DataError(f"{self.name}: document {document} holds a negative token")
            return found

        _fill(out, self._pieces_in_order(i), read)
        self._data.check()
        return out

    def loss_mask_in_order(self, i: int) -> np.ndarray:
        """Return whether the tokens of in_order(i) count in the loss, bool [seq_length + 1]."""
        return self._counted(self._pieces_in_order(i))

    def _pieces_in_order(self, i: int) -> Iterator[Piece]:
        """Yield the pieces of documents that make up in_order(i)."""
        document, offset = self.place_in_order(i)
        left = self.seq_length + 1
        while left and document < self._documents.stop:
            count = min(int(self._data.lengths[document]) - offset, left)
            yield document, offset, count
            left, document, offset = left - count, document + 1, 0

    @cached_property
    def _ends(self) -> np.ndarray:
        lengths = self._data.lengths[self._documents.start : self._documents.stop]
        return np.cumsum(lengths, dtype=np.int64)

    def _start(self, i: int) -> tuple[int, int, int]:
        """Return (epoch, place in its documents, offset) of the first token of sample i."""
        epoch = i * self.seq_length // self.tokens
        order = self._epoch(epoch)
        place, offset = order.starts[order.shuffle[i - self._first_sample(epoch)]]
        return epoch, int(place), int(offset)

    def _first_sample(self, epoch: int) -> int:
        """Return the first sample that starts in an epoch: ceil(epoch * tokens / seq_length)."""
        return -(-epoch * self.tokens // self.seq_length)

    def _epoch(self, epoch: int) -> Epoch:
        with self._lock:  # loader threads share this object
            if epoch not in self._epochs:
                while len(self._epochs) >= EPOCHS_CACHED:
                    del self._epochs[min(self._epochs)]
                self._epochs[epoch] = self._load(epoch)
            return self._epochs[epoch]

    def _load(self, epoch: int) -> Epoch:
        d = len(self._documents)
        n = self._first_sample(epoch + 1) - self._first_sample(epoch)
        size = d + 3 * n
        if size < CACHE_FROM:
            stored = self._build(epoch, n)
        else:
            facts = {**self._facts, "epoch": epoch}
            what = f"the sample order of {self.name}"
            stored = self._cache.get(facts, size, lambda: self._build(epoch, n), what)
        return Epoch(stored[:d], stored[d : d + 2 * n].reshape(n, 2), stored[d + 2 * n :])

    def _build(self, epoch: int, n: int) -> np.ndarray:
        """Draw one epoch's order; return documents, starts and shuffle as one int32 array."""
        documents = np.arange(self._documents.start, self._documents.stop, dtype=np.int32)
        shuffle = np.arange(n, dtype=np.int32)
        seed, split = self._facts["seed"], self._facts["split"]
        stable_rng(seed, split, epoch, "documents").shuffle(documents)
        stable_rng(seed, split, epoch, "samples").shuffle(shuffle)
        first = self._first_sample(epoch) * self.seq_length - epoch * self.tokens
        starts = sample_index(
            self._data.lengths, documents, first, self.seq_length, n, self._library
        )
        return np.concatenate((documents, starts.reshape(-1), shuffle))


def _fill(
    out: np.ndarray, pieces: Iterable[Piece], read: Callable[[int, int, int], np.ndarray]
) -> None:
    """Fill an array with pieces of documents, one after another."""
    done = 0
    for piece in pieces:
        out[done : done + piece[2]] = read(*piece)
        done += piece[2]


def _sha256(facts: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def stable_rng(*facts: object) -> np.random.RandomState:
    """Return numpy's frozen generator (the same numbers in every version), seeded by `facts`."""
    seed = hashlib.sha256(json.dumps(facts).encode()).digest()
    return np.random.RandomState(np.frombuffer(seed, "<u4"))
