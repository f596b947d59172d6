# SPDX-License-Identifier: Apache-2.0
"""Find memory that grows from micro-batch to micro-batch, or from step to step.

Storages that several micro-batches allocate on the same line, and that are still live when the
step's gradient sums begin, are a leak. So are bytes that are live after a step beyond those after
the previous step. Page-locked host memory counts, too.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forecast.rehearsal.events import Action, Alloc, Event, Free, Launch, Transfer
from forecast.rehearsal.order import Finding

if TYPE_CHECKING:
    from forecast.rehearsal.run import Rehearsed

SUMS = "the gradient sums"
MICRO_BATCH = re.compile(  # if an F overlaps a B, match the B's: only it writes gradients
    r"(?:.* overlapping )?(?:(?:F|B|BW|W) chunk \d+|the output layer's deferred W of) "
    r"micro-batch (\d+)"
)


def grown(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the lines whose live memory grows with each micro-batch or step, in the last step."""
    persistent = set(seen.kinds()) | arriving(seen)
    in_use: dict[int, tuple[str, int]] = {}  # live storage -> its line and micro-batch
    now = last = -1
    for _, event in numbered(seen):
        if type(event) is Alloc and now >= 0 and event.storage not in persistent:
            in_use[event.storage] = line_of(seen, event), now
        elif type(event) is Free:
            in_use.pop(event.storage, None)
        elif type(event) is Action:
            if event.words.startswith(SUMS):
                break
            now = micro_batch_of(event)
            last = now if now >= 0 else last
    left: dict[str, set[int]] = {}
    for place, micro_batch in in_use.values():
        if micro_batch != last:  # those of the last backward are freed in the next step
            left.setdefault(place, set()).add(micro_batch)
    for place, some in left.items():
        if len(some) > 1:
            what = f"memory of {len(some)} micro-batches is still live after their end"
            yield Finding("leak", place, what, "", ways(seen, place))
    yield from steps(seen, persistent)


def arriving(seen: "Rehearsed") -> set[int]:
    """Return the storages of received messages in the last step.

    A receive for a later micro-batch is posted during an earlier one.
    """
    return {
        number
        for _, event in numbered(seen)
        if type(event) is Transfer and event.verb == "receive"
        for number in event.written
    }


def micro_batch_of(event: Action) -> int:
    """Return the micro-batch of an action, or -1."""
    matched = MICRO_BATCH.match(event.words)
    return int(matched[1]) if matched else -1


def steps(seen: "Rehearsed", persistent: set[int]) -> Iterator[Finding]:
    """Yield the lines with more live memory after the last step than before it.

    Storages that replace freed ones of the same size from another line do not count: float8 scales
    by current values in its first step, and by a history in later ones.
    """
    if seen.begin == seen.first:
        return  # only one step was rehearsed
    before, then = (live_by_place(seen, end, persistent) for end in (seen.loop, seen.end))
    freed = Counter[int]()  # size -> number of storages that were live before the step only
    for place, (count, nbytes) in before.items():
        freed[nbytes // count] += max(0, count - then.get(place, (0, 0))[0])
    for place, (count, nbytes) in then.items():
        had = before.get(place, (0, 0))
        if count > had[0]:
            size = (nbytes - had[1]) // (count - had[0])
            if freed[size] >= count - had[0]:
                freed[size] -= count - had[0]
                continue
            what = f"{nbytes - had[1]:,} more bytes are live after a step than before it"
            yield Finding("leak", place, what, "", ways(seen, place))
    if len(seen.recorder.pinned_at) > 1:
        host_before, host_then = seen.recorder.pinned_at[-2:]
        for place, count in (host_then - host_before).items():
            what = f"{count} more page-locked tensors are live after a step than before it"
            yield Finding("leak", place, what, "", ways(seen, place))


def live_by_place(seen: "Rehearsed", end: int, persistent: set[int]) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of live storages before event `end`, by allocating line."""
    in_use: dict[int, Alloc] = {}
    for index in range(end):
        event = seen.recorder.events[index]
        if type(event) is Alloc:
            in_use[event.storage] = event
        elif type(event) is Free:
            in_use.pop(event.storage, None)
    count, sizes = Counter[str](), Counter[str]()
    for number, event in in_use.items():
        if number not in persistent:
            count[line_of(seen, event)] += 1
            sizes[line_of(seen, event)] += event.bytes
    return {place: (count[place], sizes[place]) for place in count if place}


def line_of(seen: "Rehearsed", event: Alloc) -> str:
    """Return the line that allocated a storage."""
    return event.where.place or seen.recorder.born.get(event.storage, "")


def ways(seen: "Rehearsed", place: str) -> tuple[str, ...]:
    """Return the call stack of a line: of a launch in the last step, or else of an allocation."""
    for index, event in numbered(seen):
        if type(event) is Launch and event.where.place == place:
            if index in seen.recorder.chains:
                return seen.recorder.chains[index]
    return seen.recorder.led.get(place, ())


def numbered(seen: "Rehearsed") -> Iterator[tuple[int, Event]]:
    """Yield the last step's events with their indices."""
    return enumerate(seen.recorder.events[seen.first :], seen.first)
