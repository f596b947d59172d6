# SPDX-License-Identifier: Apache-2.0
"""What a pipeline's schedule waits and keeps, by building it and playing it.

A schedule is data (mpu/pipeline/schedules.py), so a new one is planned as soon as it is there.
`bubble` plays a short one of the same shape (mpu/pipeline/simulate.py), and `in_flight` walks its
lists.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mpu.pipeline.schedules import NAMES, SPLIT, build
from mpu.pipeline.schedules import V_SHAPED as FOLDED
from mpu.pipeline.simulate import Costs, simulate

SCHEDULES = (*NAMES, "zb-2p")  # the last: of published runs, with twice the activations, no bubble
V_SHAPED = [SCHEDULES.index(name) for name in FOLDED]
SPLIT_SCHEDULES = [SCHEDULES.index(name) for name in (*SPLIT, "zb-2p")]  # W is separate from B
FEW = 8  # pipeline ranks that stand for more
EVEN = 2, 3  # micro-batches a rank from which a bubble grows evenly, if it grows


@lru_cache(maxsize=4096)
def bubble(name: str, p: int, m: int, v: int, again: bool, overlaps: bool = False) -> float:
    """Return the bubble of equal stages in units of 1F1B's, (p - 1) (F + B + W) of a chunk.

    F = W = 1 and B = 1, or 2 where the forward runs `again` in it. overlaps: F's overlap B's.
    """
    if name not in NAMES:
        return 0.0
    few, each = min(p, FEW), m / p
    if each <= EVEN[1]:
        return _played(name, few, each, v, again, overlaps)
    one, two = (_played(name, few, at, v, again, overlaps) for at in EVEN)
    return one + (two - one) * (each - EVEN[0]) / (EVEN[1] - EVEN[0])


@lru_cache(maxsize=4096)
def _played(name: str, p: int, each: float, v: int, again: bool, overlaps: bool) -> float:
    """Return the bubble of so many micro-batches for each of p ranks."""
    m = max(1, round(each * p))
    if name == "interleaved":
        m = -(-m // p) * p
    stages, backward = p * v, 2.0 if again else 1.0
    costs = Costs([1.0] * stages, [backward] * stages, [1.0] * stages)
    schedule = build(name, p, m, v, overlaps=overlaps)
    return simulate(schedule, costs).bubble / ((p - 1) * (2.0 + backward))


@lru_cache(maxsize=4096)
def paired(name: str, p: int, m: int, v: int) -> float:
    """Return the share of F's that overlap a B, on the rank that has most of these: the last one.

    The others have as many more F's alone as they wait less.
    """
    few = min(m, EVEN[1] * p)
    schedule = build(name, p, few, v, overlaps=True)
    alone = few * v - max(len(schedule.overlapped_forwards(rank)) for rank in range(p))
    return max(0.0, 1 - alone / (m * v))


def in_flight(
    name: str, p: int, m: int, v: int, overlaps: bool = False
) -> npt.NDArray[np.float64]:
    """Return [ranks, moments, 2]: activations of a chunk that wait for B, and those that wait for
    W, at each moment that no other exceeds in both. Moments beyond a rank's own repeat its first.

    overlaps: F's overlap B's; while both run they count once.
    """
    few = min(m, EVEN[0] * p)
    found = _in_flight(name, p, few, v, overlaps)
    if found.max() < few * v:
        return found
    return _in_flight(name, p, m, v, overlaps)  # GPipe keeps all of them


@lru_cache(maxsize=1024)
def _in_flight(name: str, p: int, m: int, v: int, overlaps: bool) -> npt.NDArray[np.float64]:
    schedule, fronts = build(name, p, m, v, overlaps=overlaps), list[list[tuple[int, int]]]()
    for rank, actions in enumerate(schedule.ranks):
        b = w = 0
        seen, pairs = set[tuple[int, int]](), schedule.overlapped_forwards(rank)
        for n, action in enumerate(actions):
            if n - 1 in pairs:  # the B that takes the place of its F
                continue
            b += {"F": n not in pairs, "B": -1}.get(action.kind, 0)
            w += {"B": 1, "W": -1}.get(action.kind, 0) * schedule.split
            seen.add((b, w))
        most, front = -1, list[tuple[int, int]]()
        for b, w in sorted(seen, reverse=True):
            if w > most:
                most = w
                front.append((b, w))
        fronts.append(front)
    longest = max(map(len, fronts))
    return np.array([front + front[:1] * (longest - len(front)) for front in fronts], float)
