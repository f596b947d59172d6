# SPDX-License-Identifier: Apache-2.0
"""Define the interface of a dataset, which files, blends and mock data implement."""

from typing import Protocol

import numpy as np

FULL_DIGEST = "xxh3:"  # how a corpus digest begins that was made of every token


class DataError(ValueError):
    """Data that cannot be trained on, or no longer; the message names the file."""


class Dataset(Protocol):
    """A sequence of samples in a fixed order; `digest` identifies that order."""

    seq_length: int
    masked: bool  # whether a part of it has a loss mask

    @property
    def length(self) -> int | None:
        """Return how many samples it has, None where it is endless.

        Where it ends, tokens after a sample's last one are PAD (training/data/batch.py), and so is
        all of a sample after the last.
        """

    @property
    def digest(self) -> str:
        """Return a SHA-256 of everything that decides which tokens sample i holds."""

    @property
    def corpus(self) -> str:
        """Return the same without the seed: of the data and how it is cut.

        It begins with FULL_DIGEST where it covers every token.
        """

    @property
    def sketch(self) -> str:
        """Return the corpus as older checkpoints know it, by 64 blocks of each file."""

    def sample(self, i: int) -> np.ndarray:
        """Return the tokens of sample i, int64 [seq_length + 1]."""

    def loss_mask(self, i: int) -> np.ndarray:
        """Return for each token of sample i whether its prediction counts in the loss, bool
        [seq_length + 1]: all do where there is no mask.
        """

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (dataset, document, offset) of the first token of sample i."""

    def describe(self, i: int) -> str:
        """Return where sample i comes from, as text for an error message."""

    def under_way(self) -> str:
        """Return where the longest read under way is, or "" where none does."""
