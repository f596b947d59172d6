# SPDX-License-Identifier: Apache-2.0
"""Mix several datasets by weight, so that every prefix of the mixture keeps to the weights.

Of the first n samples of two datasets, the lighter one (share p <= 1/2) supplies floor(n p + 1/2),
which is never more than half a sample off. More datasets are mixed two by two, lightest first, as
in a Huffman tree. An inner node of such a tree never weighs more than 2/3 of its parent, so the
error of a dataset stays below 1/2 (1 + 1 + 2/3 + 4/9 + ...) = 2 samples, however many datasets and
samples there are. A formula gives the origin of sample i: no table is built or stored.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from training.data.dataset import Composed, Dataset


class Blend(Composed):
    """Draw from `datasets` in proportion to `weights`; those of weight 0 are never drawn.

    Each dataset supplies its samples 0, 1, 2, ... in order.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]) -> None:
        assert len(datasets) == len(weights) and max(weights) > 0
        self.parts = list(datasets)
        self.weights = [float(weight) for weight in weights]
        self.seq_length = datasets[0].seq_length
        leaves = ((weight, i, i) for i, weight in enumerate(self.weights) if weight > 0)
        heap: list[tuple[float, int, Any]] = list(leaves)
        heapq.heapify(heap)
        for tie in range(len(weights), len(weights) + len(heap) - 1):
            light, _, left = heapq.heappop(heap)
            heavy, _, right = heapq.heappop(heap)
            heapq.heappush(heap, (light + heavy, tie, (left, right, light / (light + heavy))))
        self._tree = heap[0][2]

    def facts(self, hashes: list[str]) -> Any:
        return [self.weights, hashes]

    def locate(self, i: int) -> tuple[int, int]:
        datasets, inner = self.locate_all(np.array([i]))
        return int(datasets[0]), int(inner[0])

    def locate_all(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for int64 [n] sample numbers, the dataset of each and the number within it."""
        datasets = np.empty(len(samples), np.int64)
        inner = np.empty(len(samples), np.int64)
        pending = [(self._tree, np.arange(len(samples)), np.asarray(samples, np.int64))]
        while pending:
            node, rows, index = pending.pop()
            if isinstance(node, int):
                datasets[rows], inner[rows] = node, index
                continue
            left, right, share = node
            before = np.floor(index * share + 0.5).astype(np.int64)
            taken = np.floor((index + 1) * share + 0.5).astype(np.int64) > before
            pending.append((left, rows[taken], before[taken]))
            pending.append((right, rows[~taken], (index - before)[~taken]))
        return datasets, inner

    def counts(self, n: int) -> list[int]:
        """Return the number of the first n samples that each data set supplies."""
        found, pending = [0] * len(self.parts), [(self._tree, n)]
        while pending:
            node, count = pending.pop()
            if isinstance(node, int):
                found[node] = count
                continue
            left, right, share = node
            of_left = math.floor(count * share + 0.5)
            pending += [(left, of_left), (right, count - of_left)]
        return found


def parse_blend(
    paths: Sequence[str], flag: str = "--data-path"
) -> tuple[list[str], list[float] | None]:
    """Return prefixes and weights of `w1 p1 w2 p2 ...`; weights are None for prefixes alone."""
    numbers = [_number(path) for path in paths]
    if not paths:
        raise ValueError(f"{flag} names no file")
    if all(number is None for number in numbers):
        return list(paths), None
    weights = [number for number in numbers[::2] if number is not None]
    if 2 * len(weights) != len(paths):
        raise ValueError(
            f"{flag} {' '.join(paths)}: give either prefixes alone or pairs of weight and prefix"
        )
    if min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise ValueError(f"{flag}: weights {weights} must be finite, >= 0 and not all 0")
    return list(paths[1::2]), weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
