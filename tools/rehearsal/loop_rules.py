# SPDX-License-Identifier: Apache-2.0
"""What grows in the loop, and what it reads for nothing: steps and micro-batches, compared.

What a micro-batch's forward or backward began, and what lives still when the step's sums are
finished, is kept: one that each micro-batch leaves is a leak. So is what one step leaves more than
the step before. Page-locked host memory counts, too.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tools.rehearsal.events import Action, Alloc, Free, HostUse, Launch, Transfer
from tools.rehearsal.order import Finding
from tools.rehearsal.write_rules import MICRO_BATCH

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

SUMS = "the gradient sums"
FED = "training/data/batch.py"


def grown(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the lines whose memory lives on in the last step, more with each."""
    events = seen.recorder.events
    sums = (
        i for i in range(seen.first, len(events))
        if type(event := events[i]) is Action and event.words.startswith(SUMS)
    )  # fmt: skip
    end = next(sums, len(events))
    held = set(seen.kinds())
    lives: dict[int, tuple[str, int]] = {}  # what a micro-batch began: its line and number
    now = -1
    for index in range(seen.first, end):
        event = events[index]
        if type(event) is Action:
            said = MICRO_BATCH.match(event.words)
            now = int(said[1]) if said else -1
        elif type(event) is Alloc and now >= 0 and event.storage not in held:
            lives[event.storage] = line_of(seen, event), now
        elif type(event) is Free:
            lives.pop(event.storage, None)
    left: dict[str, set[int]] = {}
    for place, micro_batch in lives.values():
        left.setdefault(place, set()).add(micro_batch)
    for place, some in left.items():
        if len(some) > 2:  # the last backward's are freed by the next one
            what = f"memory of {len(some)} micro-batches lives when their step is over"
            yield Finding("leak", place, what, "", ways(seen, place))
    yield from steps(seen, held)


def steps(seen: "Rehearsed", held: set[int]) -> Iterator[Finding]:
    """Yield the lines of which more memory lives after the last step than before it.

    What lives in another line's place, storage for storage of the same size, is not more: float8's
    first step scales by what is at hand, later ones by a history.
    """
    if seen.begin == seen.first:
        return  # one step was rehearsed
    before, then = (living(seen, end, held) for end in (seen.loop, seen.end))
    gone = Counter[int]()  # storages that lived before it, by their size
    for place, (count, nbytes) in before.items():
        gone[nbytes // count] += max(0, count - then.get(place, (0, 0))[0])
    for place, (count, nbytes) in then.items():
        had = before.get(place, (0, 0))
        if count > had[0]:
            size = (nbytes - had[1]) // (count - had[0])
            if gone[size] >= count - had[0]:
                gone[size] -= count - had[0]
                continue
            what = f"{nbytes - had[1]:,} bytes more live after a step than before it"
            yield Finding("leak", place, what, "", ways(seen, place))
    if len(seen.recorder.pinned_at) > 1:
        host_before, host_then = seen.recorder.pinned_at[-2:]
        for place, count in (host_then - host_before).items():
            what = f"{count} page-locked tensors more live after a step than before it"
            yield Finding("leak", place, what, "", ways(seen, place))


def living(seen: "Rehearsed", end: int, held: set[int]) -> dict[str, tuple[int, int]]:
    """Return how many storages live before an event, and their bytes, by the lines that began
    them.
    """
    lives: dict[int, Alloc] = {}
    for index in range(end):
        event = seen.recorder.events[index]
        if type(event) is Alloc:
            lives[event.storage] = event
        elif type(event) is Free:
            lives.pop(event.storage, None)
    count, sizes = Counter[str](), Counter[str]()
    for number, event in lives.items():
        if number not in held:
            count[line_of(seen, event)] += 1
            sizes[line_of(seen, event)] += event.bytes
    return {place: (count[place], sizes[place]) for place in count if place}


def line_of(seen: "Rehearsed", event: Alloc) -> str:
    """Return the line that asked for a storage."""
    return event.where.place or seen.recorder.born.get(event.storage, "")


def ways(seen: "Rehearsed", place: str) -> tuple[str, ...]:
    """Return the lines that led to a line, of one storage that began there."""
    return seen.recorder.led.get(place, ())


def unread(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the parts of a batch that no launch of the last step reads."""
    events, recorder = seen.recorder.events, seen.recorder
    given: dict[int, str] = {}
    for index in range(seen.loop, seen.first):
        event = events[index]
        if type(event) is Alloc and event.where.place.startswith(FED):
            given[event.storage] = event.where.place
    replay, parts = recorder.replay, max(1, len(given) // max(1, seen.micro_batches))
    if replay is not None:  # the copies of a micro-batch name what it read, not what they would
        given = {
            number: place
            for at, (number, place) in enumerate(given.items())
            if not replay.copied(at // parts)
        }
    forward: tuple[str, ...] = ()
    for index in range(seen.first, len(events)):
        event = events[index]
        if isinstance(event, (Launch, Transfer, HostUse)):
            for number in event.read:
                given.pop(number, None)
            if not forward and type(event) is Launch and event.where.phase == "forward":
                forward = recorder.chains.get(index, ())
    stage = seen.run.model.stages
    ends = any(one.embedding for one in stage) and any(one.loss for one in stage)
    for place in set(given.values()) if ends else ():
        name = seen.script.__file__.rpartition("/")[2] if seen.script.__file__ else ""
        own = next((line for line in forward if line.startswith(name)), place)
        yield Finding("unread", own, "a part of the batch is read by nothing in a step", place)
