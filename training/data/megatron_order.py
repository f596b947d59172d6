# SPDX-License-Identifier: Apache-2.0
"""The samples of Megatron's GPTDataset and BlendedDataset, in its order: --data-order megatron.

Megatron draws the order of a data set from the seed alone, over all the epochs that a run of a
known length needs: first the documents of all epochs are shuffled together, then the samples.
If the run takes less than 80 % of the last epoch, that epoch is shuffled separately. So the order
depends on the number of epochs, and through it on the length of the run. A blend takes for each
sample the data set that is furthest behind its weight. The source is megatron-core 0.16.1:
core/datasets/gpt_dataset.py, blended_dataset.py, blended_megatron_dataset_builder.py, helpers.cpp.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from training.data.blend import Blend
from training.data.cache import IndexCache
from training.data.dataset import DataError
from training.data.gpt import CACHE_FROM, Epoch, GPTDataset
from training.data.indexed import IndexedTokens
from training.data.loss_mask import LossMask
from training.data.sample_index import sample_index

SURPLUS = 0.005  # share of samples beyond those that a blend needs: mid_level_dataset_surplus
SEPARATE = 0.80  # share of an epoch: with fewer samples the last one is shuffled separately


class MegatronDataset(GPTDataset):
    """The samples of one file. samples: how many are needed; None: those of one epoch.

    Raises ValueError if the range holds no whole sample.
    """

    def __init__(
        self,
        data: IndexedTokens,
        split: str,
        documents: range,
        seq_length: int,
        seed: int,
        samples: int | None,
        cache: IndexCache,
        library: ctypes.CDLL | None = None,
        loss_mask: LossMask | None = None,
    ) -> None:
        super().__init__(
            data, split, documents, seq_length, seed,
            cache=cache, library=library, loss_mask=loss_mask,
        )  # fmt: skip
        needed = 0 if samples is None else samples * seq_length + 1
        self.epochs = max(1, -(-needed // self.tokens))
        self.samples = (self.epochs * self.tokens - 1) // seq_length
        self.first = self.samples  # number of samples that are shuffled together
        if self.epochs > 1:
            assert samples is not None
            before = ((self.epochs - 1) * self.tokens - 1) // seq_length
            if samples - before < int(SEPARATE * ((self.tokens - 1) // seq_length)):
                self.first = before
        if not self.samples:
            raise ValueError(
                f"{data.prefix}: the {split} split holds {self.tokens} tokens, fewer than one "
                f"sample of --seq-length {seq_length}"
            )
        self._facts |= {"order": "megatron", "epochs": self.epochs, "first": self.first}

    def _start(self, i: int) -> tuple[int, int, int]:
        if i >= self.samples:
            raise DataError(
                f"{self.name}: --data-order megatron made {self.samples} samples for the length "
                f"of this run, and sample {i} is asked for"
            )
        order = self._epoch(0)
        place, offset = order.starts[order.shuffle[i]]
        return 0, int(place), int(offset)

    def _load(self, epoch: int) -> Epoch:
        d, n = len(self._documents) * self.epochs, self.samples
        if max(d, n) >= 1 << 31:
            raise ValueError(f"{self.name}: {max(d, n)} documents or samples do not fit in 31 bits")
        size = d + 3 * n
        if size < CACHE_FROM:
            stored = self._draw()
        else:
            what = f"the sample order of {self.name}"
            stored = self._cache.get(self._facts, size, self._draw, what)
        return Epoch(stored[:d], stored[d : d + 2 * n].reshape(n, 2), stored[d + 2 * n :])

    def _draw(self) -> np.ndarray:
        """Return documents, starts and shuffle as one int32 array, drawn as Megatron draws them."""
        rng = np.random.RandomState(self._facts["seed"])  # type: ignore[arg-type]
        once = np.arange(self._documents.start, self._documents.stop, dtype=np.int32)
        alone = self.first < self.samples
        documents = np.tile(once, self.epochs - alone)
        rng.shuffle(documents)
        if alone:
            rng.shuffle(once)
            documents = np.concatenate((documents, once))
        starts = sample_index(
            self._data.lengths, documents, 0, self.seq_length, self.samples, self._library
        )
        shuffle = np.arange(self.samples, dtype=np.int32)
        rng.shuffle(shuffle[: self.first])
        if alone:
            rng.shuffle(shuffle[self.first :])
        return np.concatenate((documents, starts.reshape(-1), shuffle))


class MegatronBlend(Blend):
    """Samples of several data sets. weights: their shares; None: their numbers of samples.

    count: how many samples are needed; None: all. Raises ValueError if a data set would have to
    give more than it has.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float] | None,
        count: int | None,
        cache: IndexCache,
        library: ctypes.CDLL | None = None,
    ) -> None:
        lengths = [dataset.samples for dataset in datasets]
        shares = normalized(lengths if weights is None else weights)
        super().__init__(datasets, shares)
        self.samples = sum(lengths) if count is None else count
        self._exhaustive = count is None
        self._room = lengths if self._exhaustive else [-1] * len(lengths)
        facts = {"format": 1, "order": "megatron", "weights": shares, "room": self._room}
        self._order = cache.get(
            {**facts, "samples": self.samples},
            2 * self.samples,
            lambda: self._draw(library),
            f"the order of a blend of {len(lengths)} data sets",
        ).reshape(2, -1)
        taken = np.bincount(self._order[0], minlength=len(lengths))
        for dataset, most, requested in zip(datasets, lengths, taken.tolist(), strict=True):
            if requested > most:
                raise ValueError(
                    f"{dataset.name}: the blend needs {requested} samples of it and it has {most}; "
                    "Megatron-LM refuses this too"
                )

    def facts(self, hashes: list[str]) -> Any:
        return ["megatron", self.weights, self._exhaustive, hashes]

    def locate_all(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for int64 [n] sample numbers, the dataset of each and the number within it."""
        if len(samples) and int(samples.max()) >= self.samples:
            raise DataError(
                f"--data-order megatron made {self.samples} samples of the blend for the length of "
                f"this run, and sample {int(samples.max())} is asked for"
            )
        return self._order[0][samples].astype(np.int64), self._order[1][samples].astype(np.int64)

    def _draw(self, library: ctypes.CDLL | None) -> np.ndarray:
        """Return int32 [2 * samples]: the data set of each sample, then its number there."""
        out = np.empty((2, self.samples), np.int32)
        weights = np.array(self.weights)
        room = np.array(self._room, np.int64)
        build = getattr(library, "weft_blend_order", None)
        if build is not None:
            drawn = np.empty(len(weights), np.int64)
            build.restype = ctypes.c_int64
            pointer, number = ctypes.c_void_p, ctypes.c_int64
            build.argtypes = [pointer, pointer, number, number, pointer, pointer, pointer]
            arrays = (out[0], out[1], drawn)
            done = build(
                weights.ctypes.data, room.ctypes.data, len(weights), self.samples,
                *(array.ctypes.data for array in arrays),
            )  # fmt: skip
            assert done == self.samples
            return out.reshape(-1)
        counts = np.zeros(len(weights), np.int64)
        for i in range(self.samples):
            behind = weights * max(i, 1) - counts
            behind[(room >= 0) & (counts >= room)] = -np.inf
            chosen = int(np.argmax(behind))
            out[:, i] = chosen, counts[chosen]
            counts[chosen] += 1
        return out.reshape(-1)


def normalized(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, with numpy's rounding as Megatron does."""
    array = np.array(weights, dtype=np.float64)
    return [float(weight) for weight in array / np.sum(array)]


def sizes_of_blend(weights: Sequence[float], samples: int) -> tuple[list[int], list[int]]:
    """Return how many samples a blend takes of each data set, and how many each one makes."""
    shares = normalized(weights)
    wanted = [math.ceil(samples * share) for share in shares]
    return wanted, [math.ceil(each * (1 + SURPLUS)) for each in wanted]
