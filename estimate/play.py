# SPDX-License-Identifier: Apache-2.0
"""Play lists of events against each other: when each begins and ends.

A lane is a list of events that are done one after another: a pipeline rank's actions, a stream's
kernels, the collectives of a link. An event is computation, a collective or a message, with its
seconds alone; what they are is the caller's. Events of several lanes that run at the same time may
slow each other down, as ranks that share cores and collectives that share a link do.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

EPSILON = 1e-12  # seconds that are nothing


class Event(NamedTuple):
    """Something that a lane does in so many seconds, were it alone.

    after: (lane, place in it) of the events that must be over before it begins. late: seconds from
    the end of those until this one may begin, such as those of a message. pair: of a collective on
    a link that others share, the seconds of two at once in units of one alone.
    """

    seconds: float
    after: tuple[tuple[int, int], ...] = ()
    late: float = 0.0
    pair: float = 2.0


Span = tuple[float, float]  # begin and end, in seconds
Lanes = Sequence[Sequence[Event]]
Speeds = Callable[[Sequence[tuple[int, Event]]], Sequence[float]]


def play(lanes: Lanes, speeds: Speeds | None = None) -> list[list[Span]]:
    """Return the span of each event of each lane. A lane that waits for ever ends early.

    speeds: of events under way at the same time, each with its lane's number, the share of its own
    speed at which each goes on; None: none slows another.
    """
    if speeds is not None:
        return _shared(lanes, speeds)
    spans: list[list[Span]] = [[] for _ in lanes]
    moved = True
    while moved:
        moved = False
        for lane, mine in zip(lanes, spans, strict=True):
            free = mine[-1][1] if mine else 0.0
            for at in range(len(mine), len(lane)):
                seconds, after, late, _ = lane[at]
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


def _shared(lanes: Lanes, speeds: Speeds) -> list[list[Span]]:
    """Play events that slow each other down: from each begin or end to the next."""
    spans: list[list[Span]] = [[] for _ in lanes]
    left, begins, arrivals = dict[int, float](), dict[int, float](), dict[int, float]()
    blocked = defaultdict[tuple[int, int], list[int]](list)  # lanes by what they wait for
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
        under_way = [(n, lanes[n][len(spans[n])]) for n in left]
        pace = dict(zip(left, speeds(under_way), strict=True))
        ends = {n: now + seconds / pace[n] for n, seconds in left.items()}
        following = min([*ends.values(), *arrivals.values()])
        ready = []
        for n, end in ends.items():
            left[n] -= (following - now) * pace[n]
            if end <= following + EPSILON:
                del left[n]
                spans[n].append((begins[n], following))
                ready += [n, *blocked.pop((n, len(spans[n]) - 1), ())]
        for n in [n for n, begin in arrivals.items() if begin <= following + EPSILON]:
            del arrivals[n]
            ready.append(n)
        now = following


def cores(count: int, each: int = 1, slower: float = 1.0) -> Speeds:
    """Return the speeds of lanes that share cores.

    each: threads of a lane, which work together. slower: what sharing costs, 1 or more.
    """

    def speeds(events: Sequence[tuple[int, Event]]) -> list[float]:
        threads = each * len(events)
        return [1.0 if threads <= count else count / threads / slower] * len(events)

    return speeds


def link(first: int) -> Speeds:
    """Return the speeds of lanes whose collectives share a link: those from number `first` on.

    n > 1 at once each go on at 2 / (n pair) of the speed that they have alone.
    """

    def speeds(events: Sequence[tuple[int, Event]]) -> list[float]:
        count = sum(lane >= first for lane, _ in events)
        return [2 / count / event.pair if lane >= first and count > 1 else 1.0
                for lane, event in events]  # fmt: skip

    return speeds
