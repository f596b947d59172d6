# SPDX-License-Identifier: Apache-2.0
"""What a pipeline's schedule waits and keeps, by building it and playing it.

A schedule is data (mpu/pipeline/schedules.py), so a new one is planned as soon as it is there.
`bubble` plays a short one of the same shape (estimate/simulate.py), `in_flight` walks its lists.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from estimate.simulate import Costs, simulate
from mpu.pipeline.schedules import NAMES, SPLIT, build
from mpu.pipeline.schedules import V_SHAPED as FOLDED

SCHEDULES = (*NAMES, "zb-2p")  # the last: of published runs, with twice the activations, no bubble
V_SHAPED = [SCHEDULES.index(name) for name in FOLDED]
SPLIT_SCHEDULES = [SCHEDULES.index(name) for name in (*SPLIT, "zb-2p")]  # W is separate from B
FEW = 8  # pipeline ranks that stand for more
EVEN = 2, 3  # micro-batches a rank from which a bubble grows evenly, if it grows


@lru_cache(maxsize=4096)
def bubble(name: str, p: int, m: int, v: int, again: bool) -> float:
    """Return the bubble of equal stages in units of 1F1B's, (p - 1) (F + B + W) of a chunk.

    F = W = 1 and B = 1, or 2 where the forward runs `again` in it.
    """
    if name not in NAMES:
        return 0.0
    few, each = min(p, FEW), m / p
    if each <= EVEN[1]:
        return _played(name, few, each, v, again)
    one, two = (_played(name, few, at, v, again) for at in EVEN)
    return one + (two - one) * (each - EVEN[0]) / (EVEN[1] - EVEN[0])


@lru_cache(maxsize=4096)
def _played(name: str, p: int, each: float, v: int, again: bool) -> float:
    """Return the bubble of so many micro-batches for each of p ranks."""
    m = max(1, round(each * p))
    if name == "interleaved":
        m = -(-m // p) * p
    stages, backward = p * v, 2.0 if again else 1.0
    costs = Costs([1.0] * stages, [backward] * stages, [1.0] * stages)
    return simulate(build(name, p, m, v), costs).bubble / ((p - 1) * (2.0 + backward))


def in_flight(name: str, p: int, m: int, v: int) -> npt.NDArray[np.float64]:
    """Return [ranks, moments, 2]: activations of a chunk that wait for B, and those that wait for
    W, at each moment that no other exceeds in both. Moments beyond a rank's own repeat its first.
    """
    few = min(m, EVEN[0] * p)
    found = _in_flight(name, p, few, v)
    return found if found.max() < few * v else _in_flight(name, p, m, v)  # GPipe keeps all of them


@lru_cache(maxsize=1024)
def _in_flight(name: str, p: int, m: int, v: int) -> npt.NDArray[np.float64]:
    schedule, fronts = build(name, p, m, v), list[list[tuple[int, int]]]()
    for actions in schedule.ranks:
        b = w = 0
        seen = set[tuple[int, int]]()
        for action in actions:
            b += {"F": 1, "B": -1}.get(action.kind, 0)
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
