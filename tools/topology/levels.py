# SPDX-License-Identifier: Apache-2.0
"""Derive the levels of links from measurements between pairs of ranks. Pure functions."""

from statistics import median

import numpy as np
import numpy.typing as npt

from forecast.planner.cluster import MOST_LEVELS, Level

Matrix = npt.NDArray[np.float64]
TYPICAL = 1 << 20  # bytes of the message by which pairs are compared
FARTHER = 1.25  # a message across blocks takes at least this many times as long


def edges(alpha: Matrix, beta: Matrix, size: float) -> Matrix:
    """Return the seconds of a message of `size` bytes between each two ranks; 0 to itself.

    alpha[i, j]: seconds of a small message from i to j. beta[i, j]: bytes a second.
    """
    with np.errstate(divide="ignore"):
        found = alpha + np.where(beta > 0, size / beta, np.inf)
    np.fill_diagonal(found, 0.0)
    return found


def blocks_of(cost: Matrix, node: int) -> list[int]:
    """Return the sizes of blocks of neighbours in which every pair is nearer than across blocks.

    cost: seconds of a typical message. node: ranks of a node, which is always a block; the last
    block is the whole. At most MOST_LEVELS.
    """
    n = len(cost)
    both = np.maximum(cost, cost.T)
    sizes = [node] if 1 < node < n else []
    for size in range(max(2, 2 * node), n, max(1, node)):
        if n % size or size % node or (sizes and size % sizes[-1]):
            continue
        home = np.arange(n) // size
        together = home[:, None] == home[None, :]
        below = np.arange(n) // (sizes[-1] if sizes else 1)
        new = together & (below[:, None] != below[None, :])
        if new.any() and both[~together].min() > FARTHER * both[new].max():
            sizes.append(size)
    return [*sizes[: MOST_LEVELS - 1], n]


def levels_of(alpha: Matrix, beta: Matrix, node: int) -> tuple[Level, ...]:
    """Return the levels of links of consecutive ranks, `node` of them on each node.

    A level's latency and bandwidth are the medians over the pairs that it is the first to join.
    Measurements of pairs do not show contention between them: oversubscription is 1.
    """
    n, below, found = len(alpha), 1, list[Level]()
    sizes = blocks_of(edges(alpha, beta, TYPICAL), node)
    outer = ["rail", "spine", "site", "outermost"]
    for size in sizes:
        home, inner = np.arange(n) // size, np.arange(n) // below
        here = (home[:, None] == home[None, :]) & (inner[:, None] != inner[None, :])
        name = "node" if size <= node and node > 1 else outer.pop(0)
        gpus = 0 if size == n else size
        found.append(Level(name, gpus, median(beta[here]), median(alpha[here])))
        below = size
    return tuple(found)
