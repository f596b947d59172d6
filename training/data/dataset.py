# SPDX-License-Identifier: Apache-2.0
"""Define the interface of a dataset, which files, blends and mock data implement, and the base
class of datasets that are composed of others.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

FULL_DIGEST = "xxh3:"  # prefix of a corpus digest that covers every token


class DataError(ValueError):
    """Data that cannot be trained on, or was changed meanwhile; the message names the file."""


class Dataset(Protocol):
    """A sequence of samples in a fixed order; `digest` identifies that order."""

    seq_length: int

    @property
    def masked(self) -> bool:
        """Return whether a part of it has a loss mask."""

    @property
    def length(self) -> int | None:
        """Return the number of samples, None if it is endless.

        If it ends, positions after the last token of a sample are PAD (training/data/batch.py), and
        so is every position of the samples after the last.
        """

    @property
    def digest(self) -> str:
        """Return a SHA-256 of everything that decides which tokens sample i holds."""

    @property
    def corpus(self) -> str:
        """Return a SHA-256 of the data and how it is cut: `digest` without the seed.

        It begins with FULL_DIGEST if it covers every token.
        """

    @property
    def sketch(self) -> str:
        """Return the corpus digest of older checkpoints, which covers 64 blocks of each file."""

    def sample(self, i: int) -> np.ndarray:
        """Return the tokens of sample i, int64 [seq_length + 1]."""

    def loss_mask(self, i: int) -> np.ndarray:
        """Return whether the prediction of each token of sample i counts in the loss, bool
        [seq_length + 1]: all True without a mask.
        """

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (dataset, document, offset) of the first token of sample i."""

    def describe(self, i: int) -> str:
        """Return where sample i comes from, as text for an error message."""

    def under_way(self) -> str:
        """Return the position of the longest read in progress, or "" if there is none."""


class Composed(ABC):
    """A dataset whose samples are each a sample of one of its `parts`."""

    seq_length: int
    parts: Sequence[Dataset]
    length: int | None = None  # endless

    @abstractmethod
    def locate(self, i: int) -> tuple[int, int]:
        """Return (part, sample of the part) for sample i."""

    @abstractmethod
    def facts(self, hashes: list[str]) -> Any:
        """Return everything that determines the samples, for JSON. hashes: those of the parts."""

    @cached_property
    def masked(self) -> bool:
        """Return whether a part has a loss mask."""
        return any(part.masked for part in self.parts)

    @property
    def digest(self) -> str:
        """Return a SHA-256 of everything that decides which tokens sample i holds."""
        return self._sha256([part.digest for part in self.parts])

    @property
    def corpus(self) -> str:
        """Return a SHA-256 of the data and how it is cut, without the seed."""
        return FULL_DIGEST + self._sha256([part.corpus for part in self.parts])

    @property
    def sketch(self) -> str:
        """Return a SHA-256 of the parts' sketches, as in older checkpoints."""
        return self._sha256([part.sketch for part in self.parts])

    def _sha256(self, hashes: list[str]) -> str:
        return hashlib.sha256(json.dumps(self.facts(hashes)).encode()).hexdigest()

    def sample(self, i: int) -> np.ndarray:
        """Return the tokens of sample i, int64 [seq_length + 1]."""
        part, inner = self.locate(i)
        return self.parts[part].sample(inner)

    def loss_mask(self, i: int) -> np.ndarray:
        """Return which tokens of sample i count in the loss, bool [seq_length + 1]."""
        part, inner = self.locate(i)
        return self.parts[part].loss_mask(inner)

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (part, document, offset) of the first token of sample i."""
        part, inner = self.locate(i)
        return part, *self.parts[part].origin(inner)[1:]

    def describe(self, i: int) -> str:
        """Return where sample i comes from, as text for an error message."""
        part, inner = self.locate(i)
        return self.parts[part].describe(inner)

    def under_way(self) -> str:
        """Return the position of a read in progress, or ""."""
        return next(filter(None, (part.under_way() for part in self.parts)), "")
