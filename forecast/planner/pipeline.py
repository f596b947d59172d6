# SPDX-License-Identifier: Apache-2.0
"""The bubble and the activations in flight of a pipeline schedule.

A schedule is data (mpu/pipeline/schedules.py), so the planner needs no change for a new one.
`bubble` simulates a short schedule of the same shape (mpu/pipeline/simulate.py); `in_flight` counts
along its lists of actions.
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
FEW = 8  # most pipeline ranks that are simulated
EVEN = 2, 3  # micro-batches per rank from which a bubble is linear in them


@lru_cache(maxsize=4096)
def bubble(name: str, p: int, m: int, v: int, again: bool, overlaps: bool = False) -> float:
    """Return the bubble of equal stages in units of 1F1B's, (p - 1) (F + B + W) of a chunk.

    F = W = 1; B = 1, or 2 if it recomputes the forward (`again`). overlaps: F's overlap B's.
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
    """Return the bubble with `each` micro-batches per rank."""
    m = max(1, round(each * p))
    if name == "interleaved":
        m = -(-m // p) * p
    stages, backward = p * v, 2.0 if again else 1.0
    costs = Costs([1.0] * stages, [backward] * stages, [1.0] * stages)
    schedule = build(name, p, m, v, overlaps=overlaps)
    return simulate(schedule, costs).bubble / ((p - 1) * (2.0 + backward))


@lru_cache(maxsize=4096)
def paired(name: str, p: int, m: int, v: int) -> float:
    """Return the share of F's that overlap a B, on the rank with most of these, the last one.

    Other ranks have more F's that overlap no B, but wait less by as much.
    """
    few = min(m, EVEN[1] * p)
    schedule = build(name, p, few, v, overlaps=True)
    alone = few * v - max(len(schedule.overlapped_forwards(rank)) for rank in range(p))
    return max(0.0, 1 - alone / (m * v))


def in_flight(
    name: str, p: int, m: int, v: int, overlaps: bool = False
) -> npt.NDArray[np.float64]:
    """Return [ranks, moments, 2]: numbers of chunks' activations stored for B, and for W.

    Only moments that no other one exceeds in both are returned; ranks with fewer of them repeat
    their first. overlaps: F's overlap B's; while both run they count once.
    """
    few = min(m, EVEN[0] * p)
    found = _in_flight(name, p, few, v, overlaps)
    if found.max() < few * v:
        return found
    return _in_flight(name, p, m, v, overlaps)  # GPipe stores all micro-batches


@lru_cache(maxsize=1024)
def _in_flight(name: str, p: int, m: int, v: int, overlaps: bool) -> npt.NDArray[np.float64]:
    schedule, fronts = build(name, p, m, v, overlaps=overlaps), list[list[tuple[int, int]]]()
    for rank, actions in enumerate(schedule.ranks):
        b = w = 0
        seen, pairs = set[tuple[int, int]](), schedule.overlapped_forwards(rank)
        for n, action in enumerate(actions):
            if n - 1 in pairs:  # this B frees what the F that overlaps it stores
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
