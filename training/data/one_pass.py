# SPDX-License-Identifier: Apache-2.0
"""Read every token of some splits once, in the order of the files: --full-validation."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from training.data.batch import PAD
from training.data.dataset import Composed
from training.data.gpt import GPTDataset


class OnePass(Composed):
    """The samples of several files in turn; each token but a file's first is a label exactly once.

    A file of T tokens has ceil((T - 1) / seq_length) samples. Sample i of it holds tokens i * s to
    i * s + s in the order of the file; its last one is filled up with PAD. Samples from `length` on
    are PAD throughout, so that batches of any size cover the files.
    """

    def __init__(self, files: Sequence[GPTDataset]) -> None:
        self.parts: list[GPTDataset] = [file for file in files if file.tokens > 1]
        self.seq_length = files[0].seq_length
        counts = [-(-(file.tokens - 1) // self.seq_length) for file in self.parts]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.length = int(sum(counts))

    def facts(self, hashes: list[str]) -> Any:
        return ["one pass", *hashes]

    def locate(self, i: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, i, side="right"))
        return file, i - (int(self._ends[file - 1]) if file else 0)

    def sample(self, i: int) -> np.ndarray:
        """Return the tokens of sample i, int64 [seq_length + 1]; PAD after the end of a file."""
        assert self.length is not None
        if i >= self.length:
            return np.full(self.seq_length + 1, PAD, np.int64)
        file, inner = self.locate(i)
        return self.parts[file].in_order(inner)

    def loss_mask(self, i: int) -> np.ndarray:
        """Return which tokens of sample i count in the loss, bool [seq_length + 1]."""
        assert self.length is not None
        if i >= self.length:
            return np.zeros(self.seq_length + 1, bool)
        file, inner = self.locate(i)
        return self.parts[file].loss_mask_in_order(inner)

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (file, document, offset) of the first token of sample i."""
        file, inner = self.locate(i)
        return file, *self.parts[file].place_in_order(inner)

    def describe(self, i: int) -> str:
        """Return where sample i comes from, as text for an error message."""
        file, document, offset = self.origin(i)
        return f"{self.parts[file].name}: document {document}, from token {offset} on"
