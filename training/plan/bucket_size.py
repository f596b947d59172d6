# SPDX-License-Identifier: Apache-2.0
"""Choose the size of gradient buckets by simulation: what a backward hides of their collectives.

    backward      | ready(0) | ready(1)    | ready(2) | end
    bucket 0                 [reduce-scatter][all-gather]
    bucket 1                               [reduce-scatter ...

Pure functions of measured times. The links do one collective after another, in the order of their
starts, as a stream of NCCL does. As in ParamAndGradBuffer, a bucket that leaves first waits for
the collective that is under way of the bucket before it, and then starts that one's next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpu.zero.layout import BLOCK, BucketLayout, ParamEntry, automatic_size, make_buckets

FINEST = 16  # times BLOCK and the ranks: elements of the smallest size that is tried
WORTH = 0.01  # share of a step by which smaller buckets must gain over larger ones


@dataclass(frozen=True)
class Cost:
    """Seconds of a collective on n elements of a bucket: start + n * each."""

    start: float = 0.0
    each: float = 0.0


class Costs(NamedTuple):
    """sums: the collectives of a bucket's sum, in order. gather: of its updated weights."""

    sums: tuple[Cost, ...]
    gather: Cost | None


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
    """One collective after another."""

    def __init__(self) -> None:
        self.free = 0.0

    def start(self, now: float, cost: Cost, elements: int) -> float:
        """Return when a collective that starts now is over."""
        self.free = max(now, self.free) + cost.start + cost.each * elements
        return self.free


def exposed_sums(
    buckets: Sequence[BucketLayout], time: Timeline, sums: Sequence[Cost], overlap: bool
) -> float:
    """Return the seconds by which a backward ends later for the sums of its gradients."""
    link, late, before = _Link(), 0.0, -1
    over = [0.0] * len(buckets)  # when the collective under way ends
    begun = [0] * len(buckets)

    def begin(k: int, now: float) -> None:
        over[k] = link.start(now, sums[begun[k]], buckets[k].length)
        begun[k] += 1

    def leave(k: int, now: float) -> float:
        """Start a bucket's sum; return when the rank goes on."""
        begin(k, now)
        if before < 0:
            return now
        now = max(now, over[before])
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
        now = max(now, over[k])
        while begun[k] < len(sums):
            begin(k, now)
            now = over[k]
    return now - time.backward


def exposed_gathers(
    buckets: Sequence[BucketLayout], time: Timeline, gather: Cost, overlap: bool
) -> float:
    """Return the seconds by which a forward ends later for the gathers of updated weights."""
    link, over = _Link(), dict[int, float]()
    for k in reversed(range(len(buckets))):
        over[k] = link.start(0.0, gather, buckets[k].length)
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
    added = exposed_sums(buckets, time, costs.sums, sums)
    if costs.gather is not None:
        added += exposed_gathers(buckets, time, costs.gather, gathers)
    return added


def candidates(largest: int, ranks: int) -> list[int]:
    """Return the sizes that are tried, each half again or a third more, up to one bucket."""
    size, found = FINEST * BLOCK * ranks, list[int]()
    while size < largest:
        found += [size, size + size // 2]
        size *= 2
    return sorted({*found, largest, automatic_size(largest)})


def seconds_of(
    entries: Sequence[ParamEntry], sizes: Sequence[int], ranks: int, stage: int, time: Timeline,
    costs: Costs, sums: bool, gathers: bool,
) -> list[float]:  # fmt: skip
    """Return what is exposed with each size of a rank's buckets."""
    known: dict[tuple[BucketLayout, ...], float] = {}
    found = []
    for size in sizes:
        buckets = tuple(make_buckets(entries, size, ranks, stage))
        if buckets not in known:
            known[buckets] = exposed(buckets, time, costs, sums, gathers)
        found.append(known[buckets])
    return found


def choose(sizes: Sequence[int], seconds: Sequence[float], step: float) -> int:
    """Return the largest size that is within WORTH of the best. step: seconds but for these."""
    limit = min(seconds) + WORTH * (step + min(seconds))
    return max(size for size, each in zip(sizes, seconds, strict=True) if each <= limit)
