# SPDX-License-Identifier: Apache-2.0
"""Simulate lists of dependent events: compute when each begins and ends.

A lane is a list of events that run one after another, like the actions of a pipeline rank. An event
has only a duration and its dependencies; its meaning is up to the caller.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """An event of a lane, which takes `seconds`.

    after: (lane, place in it) of the events that must end before it begins. late: seconds from
    their end until this one may begin, such as the time of a message.
    """

    seconds: float
    after: tuple[tuple[int, int], ...] = ()
    late: float = 0.0


Span = tuple[float, float]  # begin and end, in seconds
Lanes = Sequence[Sequence[Event]]


def play(lanes: Lanes) -> list[list[Span]]:
    """Return the span of each event of each lane. A lane that waits forever ends early."""
    spans: list[list[Span]] = [[] for _ in lanes]
    moved = True
    while moved:
        moved = False
        for lane, mine in zip(lanes, spans, strict=True):
            free = mine[-1][1] if mine else 0.0
            for at in range(len(mine), len(lane)):
                seconds, after, late = lane[at]
                begin = free
                for other, place in after:
                    theirs = spans[other]
                    if place >= len(theirs):
                        break
                    begin = max(begin, theirs[place][1] + late)
                else:
                    free = begin + seconds
                    mine.append((begin, free))
                    moved = True
                    continue
                break
    return spans
