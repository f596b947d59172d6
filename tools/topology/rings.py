# SPDX-License-Identifier: Apache-2.0
"""Find the order in which ranks make the fastest ring. Pure functions of alpha and beta.

alpha[i, j]: seconds of a small message from i to j. beta[i, j]: bytes a second. A ring starts at
rank 0; a ring and its reverse may differ, as links may.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
EXACT = 8  # ranks up to which every ring is timed


def edges(alpha: Matrix, beta: Matrix, size: float) -> Matrix:
    """Return the seconds of a message of `size` bytes between each two ranks; 0 to itself."""
    with np.errstate(divide="ignore"):
        found = alpha + np.where(beta > 0, size / beta, np.inf)
    np.fill_diagonal(found, 0.0)
    return found


def ring_seconds(cost: Matrix, ring: Sequence[int]) -> float:
    """Return the seconds of n - 1 steps round a ring, in which a rank passes on what it got last.

    cost: of one step's message between each two ranks. A rank's next send waits for its last one
    and for what it is to pass on.
    """
    order = np.asarray(ring)
    step = cost[order, np.roll(order, -1)]  # of place i to the one after it
    at = np.zeros(len(order))
    for _ in range(len(order) - 1):
        sent = at + step
        at = np.maximum(sent, np.roll(sent, 1))
    return float(at.max())


def all_rings(n: int) -> Iterator[tuple[int, ...]]:
    """Yield every ring of n ranks, each direction, from rank 0 on."""
    for rest in permutations(range(1, n)):
        yield (0, *rest)


def best_rings(cost: Matrix, count: int = 1) -> list[tuple[int, ...]]:
    """Return the `count` fastest rings by `ring_seconds`; of equals, with the least sum of edges.

    Exact up to EXACT ranks. Beyond, greedy rings from several ranks are improved by turning round
    parts of them while the slowest edge, then the sum of all, gets less: no proof that none is
    better.
    """
    n = len(cost)
    found = set(all_rings(n)) if n <= EXACT else {_improved(cost, ring) for ring in _greedy(cost)}
    found.add(tuple(range(n)))

    def worth(ring: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        total = float(cost[list(ring), np.roll(ring, -1)].sum())
        return float(f"{ring_seconds(cost, ring):.9g}"), float(f"{total:.9g}"), ring

    return sorted(found, key=worth)[:count]


def _greedy(cost: Matrix) -> Iterator[list[int]]:
    """Yield rings in which each rank is followed by the nearest that is left."""
    n = len(cost)
    yield list(range(n))
    for start in range(0, n, max(1, n // 8)):
        ring, left = [start], set(range(n)) - {start}
        while left:
            ring.append(min(left, key=lambda rank: (cost[ring[-1], rank], rank)))
            left.remove(ring[-1])
        yield ring


def _improved(cost: Matrix, ring: list[int]) -> tuple[int, ...]:
    """Return a ring after every turn of a part that makes it better."""

    def worth(ring: list[int]) -> tuple[float, float]:
        step = cost[ring, np.roll(ring, -1)]
        return float(step.max()), float(step.sum())

    best, n, moved = worth(ring), len(ring), True
    while moved:
        moved = False
        for i in range(n - 1):
            for j in range(i + 1, n):
                turned = [*ring[: i + 1], *ring[i + 1 : j + 1][::-1], *ring[j + 1 :]]
                if (now := worth(turned)) < best:
                    ring, best, moved = turned, now, True
    at = ring.index(0)
    return tuple(ring[at:] + ring[:at])
