# SPDX-License-Identifier: Apache-2.0
"""Find memory that grows from micro-batch to micro-batch, or from step to step.

A storage that each micro-batch's forward or backward allocates, and that still exists when the
step's sums begin, is a leak. So are bytes that exist after a step beyond those after the
step before. Page-locked host memory counts, too.
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
MICRO_BATCH = re.compile(  # of an F overlapping a B that of the B: only it writes gradients
    r"(?:.* overlapping )?(?:(?:F|B|BW|W) chunk \d+|the output layer's deferred W of) "
    r"micro-batch (\d+)"
)


def grown(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the lines whose memory lives on in the last step, more with each micro-batch or step.
    """
    persistent = set(seen.kinds()) | arriving(seen)
    in_use: dict[int, tuple[str, int]] = {}  # what a micro-batch began: its line and number
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
        if micro_batch != last:  # the last backward's are freed by the next step's
            left.setdefault(place, set()).add(micro_batch)
    for place, some in left.items():
        if len(some) > 1:
            what = f"memory of {len(some)} micro-batches lives when they are over"
            yield Finding("leak", place, what, "", ways(seen, place))
    yield from steps(seen, persistent)


def arriving(seen: "Rehearsed") -> set[int]:
    """Return the storages that messages of the last step arrive in: a later micro-batch's, which
    an earlier one's action has posted.
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
    """Yield the lines of which more memory lives after the last step than before it.

    What lives in another line's place, storage for storage of the same size, is not more: float8's
    first step scales by what is at hand, later ones by a history.
    """
    if seen.begin == seen.first:
        return  # one step was rehearsed
    before, then = (live_by_place(seen, end, persistent) for end in (seen.loop, seen.end))
    freed = Counter[int]()  # storages that lived before it, by their size
    for place, (count, nbytes) in before.items():
        freed[nbytes // count] += max(0, count - then.get(place, (0, 0))[0])
    for place, (count, nbytes) in then.items():
        had = before.get(place, (0, 0))
        if count > had[0]:
            size = (nbytes - had[1]) // (count - had[0])
            if freed[size] >= count - had[0]:
                freed[size] -= count - had[0]
                continue
            what = f"{nbytes - had[1]:,} bytes more live after a step than before it"
            yield Finding("leak", place, what, "", ways(seen, place))
    if len(seen.recorder.pinned_at) > 1:
        host_before, host_then = seen.recorder.pinned_at[-2:]
        for place, count in (host_then - host_before).items():
            what = f"{count} page-locked tensors more live after a step than before it"
            yield Finding("leak", place, what, "", ways(seen, place))


def live_by_place(seen: "Rehearsed", end: int, persistent: set[int]) -> dict[str, tuple[int, int]]:
    """Return how many storages live before an event, and their bytes, by the lines that began
    them.
    """
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
    """Return the lines that led to a line: in the last step, or of a storage that began there."""
    for index, event in numbered(seen):
        if type(event) is Launch and event.where.place == place:
            if index in seen.recorder.chains:
                return seen.recorder.chains[index]
    return seen.recorder.led.get(place, ())


def numbered(seen: "Rehearsed") -> Iterator[tuple[int, Event]]:
    """Yield the last step's events with their indices."""
    return enumerate(seen.recorder.events[seen.first :], seen.first)
