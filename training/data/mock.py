# SPDX-License-Identifier: Apache-2.0
"""Generate samples for runs without data (`--mock-data`)."""

import hashlib
import json

import numpy as np

from training.data.gpt import stable_rng


class MockDataset:
    """Endless documents that count upwards from a random token, so that a model can learn.

    A document takes a quarter of a sample on average and ends with `eod`, if there is one.
    """

    length = None
    masked = False

    def __init__(
        self, split: str, seq_length: int, seed: int, vocab_size: int, eod: int | None
    ) -> None:
        if vocab_size < 2:
            raise ValueError(f"--mock-data needs a vocabulary of >= 2 tokens, not {vocab_size}")
        self.seq_length = seq_length
        self._vocab_size = vocab_size
        self._eod = eod
        self._facts = ["mock", split, seq_length, seed, vocab_size, eod]

    @property
    def digest(self) -> str:
        """Return a SHA-256 of everything that decides which tokens sample i holds."""
        return hashlib.sha256(json.dumps(self._facts).encode()).hexdigest()

    @property
    def corpus(self) -> str:
        """Return a SHA-256 of the split and the sequence length alone."""
        return hashlib.sha256(json.dumps(self._facts[:3]).encode()).hexdigest()

    @property
    def sketch(self) -> str:
        """Return `corpus`: there is no file."""
        return self.corpus

    def sample(self, i: int) -> np.ndarray:
        """Return the tokens of sample i, int64 [seq_length + 1]."""
        n = self.seq_length + 1
        rng = stable_rng(*self._facts, i)
        ends = rng.random_sample(n) < 4 / n
        document: np.ndarray = np.cumsum(ends) - ends
        first = rng.randint(0, self._vocab_size, size=n)[document]
        if self._eod is None:
            return (first + np.arange(n)) % self._vocab_size
        tokens = (first + np.arange(n)) % (self._vocab_size - 1)
        tokens += tokens >= self._eod  # skip the end-of-document token
        return np.where(ends, self._eod, tokens)

    def loss_mask(self, i: int) -> np.ndarray:
        """Return True for each token of sample i."""
        return np.ones(self.seq_length + 1, bool)

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (0, i, 0): each sample is its own document."""
        return 0, i, 0

    def describe(self, i: int) -> str:
        """Return where sample i comes from, as text for an error message."""
        return f"mock data, sample {i}"

    def under_way(self) -> str:
        """Return "": nothing is read."""
        return ""
