# SPDX-License-Identifier: Apache-2.0
"""The samples of a run whose data change by stages (--data-stages).

A data set that several stages read continues where the earlier stages left it: in each of its
epochs every sample is read once, whichever stages read it. If the sequence length changes, it
continues at the first sample after as many tokens as were read of it; that epoch is then cut again,
so a part of it may be read twice and an equally large part not at all.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from training.data.blend import Blend
from training.data.dataset import FULL_DIGEST, Composed, Dataset
from training.data.gpt import GPTDataset
from training.settings.config import Stage
from training.settings.stages import stage_at


class DatasetFrom(Composed):
    """A data set from sample `first` on."""

    def __init__(self, dataset: GPTDataset, first: int) -> None:
        self.parts, self.first, self.seq_length = [dataset], first, dataset.seq_length

    def facts(self, hashes: list[str]) -> Any:
        return ["from", self.first, *hashes]

    def locate(self, i: int) -> tuple[int, int]:
        return 0, self.first + i


@dataclass(frozen=True)
class StageData:
    """The data sets of a stage and their weights; a key identifies a data set in all stages."""

    datasets: Sequence[GPTDataset]
    weights: Sequence[float]
    keys: Sequence[Hashable]


class Staged(Composed):
    """The endless samples of a run, stage after stage; those of a stage are a blend.

    starts[i]: for each data set of stage i the sample at which it continues.
    """

    def __init__(self, stages: Sequence[Stage], data: Sequence[StageData], current: int) -> None:
        self.stages, self.seq_length = stages, stages[current].length
        read: dict[Hashable, int] = {}  # tokens
        numbers: dict[Hashable, int] = {}  # of the data sets, over all stages
        self._numbers: list[list[int]] = []
        self.starts: list[list[int]] = []
        self.parts: list[Dataset] = []
        self.corpora: list[str] = []  # of the stages, independent of earlier stages
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
            self.parts.append(blend)

    def facts(self, hashes: list[str]) -> Any:
        stages = zip(self.stages, hashes, strict=True)
        return ["stages", *([stage.first_sample, found] for stage, found in stages)]

    @property
    def digest(self) -> str:
        """Return a SHA-256 of everything that decides which tokens sample i holds."""
        return self._sha256(self._digests)

    @property
    def corpus(self) -> str:
        """Return a SHA-256 of the data and how it is cut, without the seed."""
        return FULL_DIGEST + self._sha256(self.corpora)

    @property
    def sketch(self) -> str:
        """Return the corpus: older checkpoints have no stages."""
        return self.corpus

    def origin(self, i: int) -> tuple[int, int, int]:
        """Return (dataset, document, offset) of the first token of sample i; data sets are numbered
        over all stages.
        """
        stage, inner = self.locate(i)
        dataset, *place = self.parts[stage].origin(inner)
        return self._numbers[stage][dataset], place[0], place[1]

    def locate(self, i: int) -> tuple[int, int]:
        stage = stage_at(self.stages, i)
        return stage, i - self.stages[stage].first_sample
