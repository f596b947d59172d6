# SPDX-License-Identifier: Apache-2.0
"""Choose the size of gradient buckets by simulation: what a backward hides of their collectives.

    backward      | ready(0) | ready(1)    | ready(2) | end
    bucket 0                 [reduce-scatter][all-gather]
    bucket 1                               [reduce-scatter ...

Pure functions of measured times. On NCCL a link does one collective after another, in the order of
their starts, as a stream does; on gloo those that are under way share it, and two at once may use
more of it than one alone. As in ParamAndGradBuffer, a bucket that leaves first waits for the
collective that is under way of the bucket before it, and then starts that one's next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimate.play import Event, link, play
from mpu.zero.bucket_layout import (
    BLOCK,
    BucketLayout,
    ParamEntry,
    Sharing,
    automatic_size,
    make_buckets,
)

FINEST = 16  # times BLOCK and the ranks: elements of the smallest size that is tried
WORTH = 0.01  # share of a step by which smaller buckets must gain over larger ones


@dataclass(frozen=True)
class Cost:
    """Seconds of a collective on n elements of a bucket: start + n * each, or as measured.

    measured: rows of elements, ascending, seconds alone, and seconds of two at once in units of
    those: 2 where one alone fills the link, more where a link lets a short burst pass faster.
    """

    start: float = 0.0
    each: float = 0.0
    measured: tuple[tuple[float, float, float], ...] = ()

    def seconds(self, elements: int) -> float:
        """Return the seconds of a collective that is alone."""
        if not self.measured:
            return self.start + self.each * elements
        sizes, alone, _ = zip(*self.measured, strict=True)
        return float(np.interp(elements, sizes, alone)) + self.each * max(0, elements - sizes[-1])

    def pair(self, elements: int) -> float:
        """Return the seconds of two collectives at once in units of one alone."""
        if not self.measured:
            return 2.0
        sizes, _, pairs = zip(*self.measured, strict=True)
        return float(np.interp(elements, sizes, pairs))


class Costs(NamedTuple):
    """sums: the collectives of a bucket's sum, in order. gather: of its updated weights.

    shared: whether collectives that are under way at once share the link; else they take turns.
    """

    sums: tuple[Cost, ...]
    gather: Cost | None
    shared: bool = False


@dataclass(frozen=True)
class Timeline:
    """When a micro-batch uses each parameter, by name, in seconds.

    used: from the start of forward to its first use. ready: from the start of backward to its
    gradient. forward, backward: in total.
    """

    used: Mapping[str, float]
    ready: Mapping[str, float]
    forward: float
    backward: float


RANK = 0  # the lane of what the rank itself does; the link's follow


class _Lanes:
    """What a rank does, and the collectives that it starts, as lists for `play`."""

    def __init__(self, shared: bool) -> None:
        self.shared, self.lanes = shared, list[list[Event]]([[]])

    def computes(self, seconds: float) -> None:
        self.lanes[RANK].append(Event(seconds))

    def starts(self, cost: Cost, elements: int) -> tuple[int, int]:
        """Start a collective at once where the link is shared, else behind those before it."""
        own = self.lanes[RANK]
        after = ((RANK, len(own) - 1),) if own else ()
        if self.shared or len(self.lanes) == 1:
            self.lanes.append([])
        self.lanes[-1].append(Event(cost.seconds(elements), after, pair=cost.pair(elements)))
        return len(self.lanes) - 1, len(self.lanes[-1]) - 1

    def waits(self, collective: tuple[int, int]) -> None:
        self.lanes[RANK].append(Event(0.0, (collective,)))

    def end(self) -> float:
        """Return the seconds after which the rank has done all."""
        spans = play(self.lanes, link(RANK + 1) if self.shared else None)
        return spans[RANK][-1][1] if spans[RANK] else 0.0


def exposed_sums(
    buckets: Sequence[BucketLayout], time: Timeline, costs: Costs, overlap: bool
) -> float:
    """Return the seconds by which a backward ends later for the sums of its gradients."""
    lanes, sums = _Lanes(costs.shared), costs.sums
    begun = [0] * len(buckets)
    under_way = dict[int, tuple[int, int]]()  # each one's last collective, in order of leaving

    def begin(k: int) -> None:
        under_way[k] = lanes.starts(sums[begun[k]], buckets[k].length)
        begun[k] += 1

    def leave(k: int) -> None:
        """Start a bucket's sum, and go on with that of the bucket before it."""
        before = next(reversed(under_way), -1)
        begin(k)
        if before >= 0:
            lanes.waits(under_way[before])
            if begun[before] < len(sums):
                begin(before)

    ready = 0.0
    for k, bucket in enumerate(buckets):
        if not overlap or bucket.axes:
            break  # it, and all after it, leave when backward is over
        at = max(ready, *(time.ready[name] for name, *_ in bucket.params))
        lanes.computes(at - ready)
        ready = at
        leave(k)
    lanes.computes(time.backward - ready)
    for k in range(len(under_way), len(buckets)):
        leave(k)
    for k in range(len(buckets)):
        lanes.waits(under_way[k])
        while begun[k] < len(sums):
            begin(k)
            lanes.waits(under_way[k])
    return lanes.end() - time.backward


def exposed_gathers(
    buckets: Sequence[BucketLayout], time: Timeline, costs: Costs, overlap: bool
) -> float:
    """Return the seconds by which a forward ends later for the gathers of updated weights."""
    if costs.gather is None:
        return 0.0
    lanes, own = _Lanes(costs.shared), dict[int, tuple[int, int]]()
    for k in reversed(range(len(buckets))):
        own[k] = lanes.starts(costs.gather, buckets[k].length)
    at = 0.0
    first = {k: min(time.used[name] for name, *_ in b.params) for k, b in enumerate(buckets)}
    for k in sorted(first, key=lambda k: first[k]):
        if overlap:
            lanes.computes(first[k] - at)
            at = first[k]
        lanes.waits(own[k])
    return lanes.end() - at


def exposed(
    buckets: Sequence[BucketLayout], time: Timeline, costs: Costs, sums: bool, gathers: bool
) -> float:
    """Return what sums and gathers add to a step. sums, gathers: whether they overlap."""
    return exposed_sums(buckets, time, costs, sums) + exposed_gathers(buckets, time, costs, gathers)


def candidates(largest: int, ranks: int) -> list[int]:
    """Return the sizes that are tried, each half again or a third more, up to one bucket."""
    size, found = FINEST * BLOCK * ranks, list[int]()
    while size < largest:
        found += [size, size + size // 2]
        size *= 2
    return sorted({*found, largest, automatic_size(largest)})


def seconds_of(
    entries: Sequence[ParamEntry], sizes: Sequence[int], sharing: Mapping[str, Sharing],
    time: Timeline, costs: Costs, sums: bool, gathers: bool,
) -> list[float]:  # fmt: skip
    """Return what is exposed with each size of a rank's buckets."""
    known: dict[tuple[BucketLayout, ...], float] = {}
    found = []
    for size in sizes:
        buckets = tuple(make_buckets(entries, size, sharing))
        if buckets not in known:
            known[buckets] = exposed(buckets, time, costs, sums, gathers)
        found.append(known[buckets])
    return found


def choose(sizes: Sequence[int], seconds: Sequence[float], step: float) -> int:
    """Return the largest size that is within WORTH of the best. step: seconds but for these."""
    limit = min(seconds) + WORTH * (step + min(seconds))
    return max(size for size, each in zip(sizes, seconds, strict=True) if each <= limit)
