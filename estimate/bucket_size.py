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

from mpu.zero.layout import (
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
    gradient. forward, backward: the whole.
    """

    used: Mapping[str, float]
    ready: Mapping[str, float]
    forward: float
    backward: float


class _Link:
    """Collectives under way, by number, on a link on which time never goes back.

    n > 1 that share it each go on at 2 / (n pair) of the speed that they have alone.
    """

    def __init__(self, shared: bool) -> None:
        self.shared, self.now = shared, 0.0
        self.left = dict[int, float]()  # seconds, were it alone
        self.pair = list[float]()
        self.ended = dict[int, float]()

    def start(self, now: float, cost: Cost, elements: int) -> int:
        """Start a collective; return its number."""
        while self.left and self.now < now:
            self._go_on(now)
        self.now = max(self.now, now)
        number = len(self.pair)
        self.left[number] = cost.seconds(elements)
        self.pair.append(cost.pair(elements))
        return number

    def over(self, number: int) -> float:
        """Return when a collective ends, if nothing else begins until then."""
        while number not in self.ended:
            self._go_on()
        return self.ended[number]

    def _go_on(self, until: float = float("inf")) -> None:
        """Go on until the next one is over, or a moment before that."""
        count, first = len(self.left), next(iter(self.left))
        speed = {first: 1.0}
        if self.shared and count > 1:
            speed = {number: 2 / count / self.pair[number] for number in self.left}
        following = min(speed, key=lambda number: self.left[number] / speed[number])
        end = self.now + self.left[following] / speed[following]
        for number, each in speed.items():
            self.left[number] -= (min(end, until) - self.now) * each
        self.now = min(end, until)
        if end <= until:
            self.ended[following] = end
            del self.left[following]


def exposed_sums(
    buckets: Sequence[BucketLayout], time: Timeline, costs: Costs, overlap: bool
) -> float:
    """Return the seconds by which a backward ends later for the sums of its gradients."""
    link, late, before, sums = _Link(costs.shared), 0.0, -1, costs.sums
    under_way = [0] * len(buckets)  # the number of each one's last collective
    begun = [0] * len(buckets)

    def begin(k: int, now: float) -> None:
        under_way[k] = link.start(now, sums[begun[k]], buckets[k].length)
        begun[k] += 1

    def leave(k: int, now: float) -> float:
        """Start a bucket's sum; return when the rank goes on."""
        begin(k, now)
        if before < 0:
            return now
        now = max(now, link.over(under_way[before]))
        if begun[before] < len(sums):
            begin(before, now)
        return now

    ready = 0.0
    for k, bucket in enumerate(buckets):
        if not overlap or bucket.axes:
            break  # it, and all after it, leave when backward is over
        ready = max(ready, *(time.ready[name] for name, *_ in bucket.params))
        late = leave(k, ready + late) - ready
        before = k
    now = time.backward + late
    for k in range(before + 1, len(buckets)):
        now = leave(k, now)
        before = k
    for k in range(len(buckets)):
        now = max(now, link.over(under_way[k]))
        while begun[k] < len(sums):
            begin(k, now)
            now = link.over(under_way[k])
    return now - time.backward


def exposed_gathers(
    buckets: Sequence[BucketLayout], time: Timeline, costs: Costs, overlap: bool
) -> float:
    """Return the seconds by which a forward ends later for the gathers of updated weights."""
    if costs.gather is None:
        return 0.0
    link, own = _Link(costs.shared), dict[int, int]()
    for k in reversed(range(len(buckets))):
        own[k] = link.start(0.0, costs.gather, buckets[k].length)
    over = {k: link.over(number) for k, number in own.items()}
    if not overlap:
        return max(over.values())
    late = 0.0
    first = {k: min(time.used[name] for name, *_ in b.params) for k, b in enumerate(buckets)}
    for k in sorted(first, key=lambda k: first[k]):
        late = max(late, over[k] - first[k])
    return late


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
