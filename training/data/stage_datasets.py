# SPDX-License-Identifier: Apache-2.0
"""The samples of a run whose data change by stages (--data-stages).

A data set that several stages read continues where the stages before left it: in each of its epochs
every sample comes once, whichever stages read it. Where the sequence length changes, it continues
at the first sample after as many tokens as were read of it; that epoch is then cut again, so a part
of it may be read twice and an equally large part not at all.
"""

import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from training.data.blend import Blend
from training.data.dataset import FULL_DIGEST, Dataset
from training.data.gpt import GPTDataset
from training.settings.config import Stage
from training.settings.stages import stage_at


class DatasetFrom:
    """A data set from sample `first` on."""

    length = None

    def __init__(self, dataset: GPTDataset, first: int) -> None:
        self.dataset, self.first = dataset, first
        self.seq_length, self.masked = dataset.seq_length, dataset.masked
        self.digest, self.corpus, self.sketch = dataset.digest, dataset.corpus, dataset.sketch

    def sample(self, i: int) -> np.ndarray:
        """Return the tokens of sample i, int64 [seq_length + 1]."""
        return self.dataset.sample(self.first + i)

    def loss_mask(self, i: int) -> np.ndarray:
        """Return which tokens of sample i count in the loss, bool [seq_length + 1]."""
        return self.dataset.loss_mask(self.first + i)

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (0, document, offset) of the first token of sample i."""
        return self.dataset.origin(self.first + i)

    def describe(self, i: int) -> str:
        """Return where sample i comes from, as text for an error message."""
        return self.dataset.describe(self.first + i)

    def under_way(self) -> str:
        """Return where a read is under way, or ""."""
        return self.dataset.under_way()


@dataclass(frozen=True)
class StageData:
    """The data sets of a stage and their weights; a key is the same wherever the data set is."""

    datasets: Sequence[GPTDataset]
    weights: Sequence[float]
    keys: Sequence[Hashable]


class Staged:
    """The endless samples of a run, stage after stage; those of a stage are a blend.

    starts[i]: for each data set of stage i the sample at which it goes on.
    """

    length = None

    def __init__(self, stages: Sequence[Stage], data: Sequence[StageData], current: int) -> None:
        self.stages, self.seq_length = stages, stages[current].length
        read: dict[Hashable, int] = {}  # tokens
        numbers: dict[Hashable, int] = {}  # of the data sets, over all stages
        self._numbers: list[list[int]] = []
        self.starts: list[list[int]] = []
        self.blends: list[Dataset] = []
        self.corpora: list[str] = []  # of the stages, whichever stages were before
        self._digests: list[str] = []
        for i, (stage, part) in enumerate(zip(stages, data, strict=True)):
            starts = [-(-read.get(key, 0) // stage.length) for key in part.keys]
            parts = [DatasetFrom(d, n) for d, n in zip(part.datasets, starts, strict=True)]
            blend = Blend(parts, part.weights)
            full = part.datasets[0] if len(parts) == 1 else Blend(part.datasets, part.weights)
            self.corpora.append(full.corpus)
            self._digests.append(full.digest)
            if i + 1 < len(stages):
                taken = blend.counts(stages[i + 1].first_sample - stage.first_sample)
                for key, start, count in zip(part.keys, starts, taken, strict=True):
                    read[key] = (start + count) * stage.length if count else read.get(key, 0)
            self._numbers.append([numbers.setdefault(key, len(numbers)) for key in part.keys])
            self.starts.append(starts)
            self.blends.append(blend)
        self.masked = any(each.masked for each in self.blends)

    @property
    def digest(self) -> str:
        """Return a SHA-256 of everything that decides which tokens sample i holds."""
        facts = [[s.first_sample, d] for s, d in zip(self.stages, self._digests, strict=True)]
        return hashlib.sha256(json.dumps(["stages", *facts]).encode()).hexdigest()

    @property
    def corpus(self) -> str:
        """Return the same without the seed."""
        facts = [[s.first_sample, c] for s, c in zip(self.stages, self.corpora, strict=True)]
        return FULL_DIGEST + hashlib.sha256(json.dumps(["stages", *facts]).encode()).hexdigest()

    @property
    def sketch(self) -> str:
        """Return the corpus: older checkpoints have no stages."""
        return self.corpus

    def sample(self, i: int) -> np.ndarray:
        """Return the tokens of sample i, int64 [length of its stage + 1]."""
        stage, inner = self._locate(i)
        return self.blends[stage].sample(inner)

    def loss_mask(self, i: int) -> np.ndarray:
        """Return for each token of sample i whether it counts in the loss: bool."""
        stage, inner = self._locate(i)
        return self.blends[stage].loss_mask(inner)

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (dataset, document, offset) of the first token of sample i; data sets are counted
        over all stages.
        """
        stage, inner = self._locate(i)
        dataset, *place = self.blends[stage].origin(inner)
        return self._numbers[stage][dataset], place[0], place[1]

    def describe(self, i: int) -> str:
        """Return where sample i comes from, as text for an error message."""
        stage, inner = self._locate(i)
        return self.blends[stage].describe(inner)

    def under_way(self) -> str:
        """Return where a read is under way, or ""."""
        return next(filter(None, (blend.under_way() for blend in self.blends)), "")

    def _locate(self, i: int) -> tuple[int, int]:
        stage = stage_at(self.stages, i)
        return stage, i - self.stages[stage].first_sample
