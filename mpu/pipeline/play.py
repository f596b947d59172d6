# SPDX-License-Identifier: Apache-2.0
"""Simulate lists of dependent events: compute when each begins and ends.

A lane is a list of events that run one after another, like the actions of a pipeline rank. An event
has only a duration and its dependencies; its meaning is up to the caller. Events of different lanes
that run at the same time may slow each other down, as ranks that share cores do.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

EPSILON = 1e-12  # seconds: a shorter interval counts as zero


class Event(NamedTuple):
    """An event of a lane, which takes `seconds` if nothing slows it down.

    after: (lane, place in it) of the events that must end before it begins. late: seconds from
    their end until this one may begin, such as the time of a message.
    """

    seconds: float
    after: tuple[tuple[int, int], ...] = ()
    late: float = 0.0


Span = tuple[float, float]  # begin and end, in seconds
Lanes = Sequence[Sequence[Event]]
Speed = Callable[[int], float]


def play(lanes: Lanes, speed: Speed | None = None) -> list[list[Span]]:
    """Return the span of each event of each lane. A lane that waits forever ends early.

    speed: the fraction of full speed at which each of n concurrent events runs; None: always 1.
    """
    if speed is not None:
        return _shared(lanes, speed)
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


def _shared(lanes: Lanes, speed: Speed) -> list[list[Span]]:
    """Simulate events that slow each other down, stepping from each begin or end to the next."""
    spans: list[list[Span]] = [[] for _ in lanes]
    left, begins, arrivals = dict[int, float](), dict[int, float](), dict[int, float]()
    blocked = defaultdict[tuple[int, int], list[int]](list)  # event: the lanes that wait for it
    now, ready = 0.0, list(range(len(lanes)))  # ready: lanes whose next event may begin
    while True:
        for n in ready:
            if len(spans[n]) == len(lanes[n]):
                continue
            event, begin = lanes[n][len(spans[n])], now
            for other, place in event.after:
                if place >= len(spans[other]):
                    blocked[other, place].append(n)
                    break
                begin = max(begin, spans[other][place][1] + event.late)
            else:
                if begin > now + EPSILON:
                    arrivals[n] = begin
                else:
                    left[n], begins[n] = event.seconds, now
        if not left and not arrivals:
            return spans
        pace = speed(len(left)) if left else 1.0
        ends = {n: now + seconds / pace for n, seconds in left.items()}
        following = min([*ends.values(), *arrivals.values()])
        ready = []
        for n, end in ends.items():
            left[n] -= (following - now) * pace
            if end <= following + EPSILON:
                del left[n]
                spans[n].append((begins[n], following))
                ready += [n, *blocked.pop((n, len(spans[n]) - 1), ())]
        for n in [n for n, begin in arrivals.items() if begin <= following + EPSILON]:
            del arrivals[n]
            ready.append(n)
        now = following


def cores(count: int, each: int = 1, slower: float = 1.0) -> Speed:
    """Return the speed of lanes that share cores.

    each: threads of a lane, which work together. slower: slowdown factor of sharing, 1 or more.
    """

    def speed(lanes: int) -> float:
        threads = each * lanes
        return 1.0 if threads <= count else count / threads / slower

    return speed
