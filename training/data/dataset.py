# SPDX-License-Identifier: Apache-2.0
"""What a loader needs of a dataset: files, blends and mock data all offer it."""

from typing import Protocol

import numpy as np


class Dataset(Protocol):
    """An endless collection of samples in one fixed order; `digest` names that order."""

    seq_length: int

    @property
    def digest(self) -> str:
        """Return a SHA-256 of everything that decides which tokens sample i holds."""

    @property
    def corpus(self) -> str:
        """Return a SHA-256 of the same but for the seed: what is drawn from, and how it is cut."""

    def sample(self, i: int) -> np.ndarray:
        """Return the tokens of sample i, int64 [seq_length + 1]."""

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (dataset, document, offset) of the first token of sample i."""

    def describe(self, i: int) -> str:
        """Say where sample i comes from, for an error message."""
