# SPDX-License-Identifier: Apache-2.0
"""Replay micro-batches that repeat, rather than run them: a step of 256 costs as much as one of 4.

The first three micro-batches of a step run, and the last one. By the third a step repeats itself:
its buffers exist, and what it does is what every later one does. Its record is the pattern for
those between: each action's events are written again, with new numbers for what begins in them.

    what the pattern names                          what its copy for micro-batch i names
    begun in an action of micro-batch 2             the same, begun in that action of i
    begun in an action of micro-batch 1             the same, begun in that action of i - 1
    anything else: weights, buffers, streams        the same thing

Messages between stages are not replayed: they are sent, received and waited for as in every step.
A storage that the last micro-batch frees was allocated by the third one and passed on from copy to
copy. What the record frees in its place is the newest storage that its line allocated.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tools.rehearsal.events import (
    Action,
    Alloc,
    Event,
    Free,
    HostWait,
    Launch,
    Record,
    RecordStream,
    Transfer,
    Wait,
)
from tools.rehearsal.record import Recorder

# what begins here ends with a full backward: autograd's thread holds it until the next begins
PASSING = ("mpu/recompute.py", "mpu/layers/")
PATTERN = 2  # the micro-batch that is copied
STORAGE, TRANSFER, EVENT = "storage", "transfer", "event"


class Place(NamedTuple):
    """Where something began: in an action of a micro-batch, as its k-th that is like it."""

    action: str  # F, B, W
    chunk: int
    micro_batch: int
    sort: str
    like: tuple[str | int, ...]
    k: int

    def of(self, i: int) -> "Place":
        """Return where a copy for micro-batch i has what the pattern has here."""
        return self._replace(micro_batch=self.micro_batch + i - PATTERN)

    @property
    def line(self) -> "Place":
        """Return what its copies in other micro-batches share with it."""
        return self._replace(micro_batch=-1)


class Pattern(NamedTuple):
    """The events of an action. out: the storage that it hands on, or -1. chains: the lines that led
    to an event, by its place among them.
    """

    events: list[Event]
    out: int
    chains: dict[int, tuple[str, ...]]


class Replay:
    """What has begun in which action of the step that runs, and the patterns."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.count = 0  # micro-batches of the step
        self.patterns: dict[tuple[str, int], Pattern] = {}
        self.begun: dict[Place, int] = {}
        self.place: dict[tuple[str, int], Place] = {}
        self.newest: dict[Place, int] = {}  # line -> micro-batch
        self.over: set[int] = set()  # storages that the copies have ended
        self.tail: tuple[list[Event], int] | None = None  # a pattern that may go on
        self.handed: set[int] = set()  # storages of tensors that copies have handed on
        self.inputs: dict[tuple[int, int], Tensor] = {}  # what a copied forward took
        self.given: dict[int, int] = {}  # chunk -> storage that the pattern's forward took

    def begin(self, micro_batches: int, copies: bool) -> None:
        """Begin a schedule's execution. copies: whether micro-batches may be replayed."""
        self.count = micro_batches if copies else 0
        for table in (self.patterns, self.begun, self.place, self.newest, self.inputs, self.given):
            table.clear()
        self.over.clear()
        self.handed.clear()

    def copied(self, micro_batch: int) -> bool:
        """Return whether a micro-batch is replayed."""
        return PATTERN < micro_batch < self.count - 1

    def run(
        self, action: str, chunk: int, i: int, work: Callable[[], Any], given: Tensor | None = None
    ) -> Any:
        """Do the work of an action for real, and keep what it did."""
        if not self.count:
            return work()
        recorder = self.recorder
        self.close()
        first = len(recorder.events)
        out = work()
        if i == self.count - 1:
            self._end_of_copies(action, chunk, i)
        events = recorder.events[first:]
        counts = Counter[tuple[str, tuple[str | int, ...]]]()
        for event in events:
            if found := begins(event):
                sort, number, like = found
                self._note(Place(action, chunk, i, sort, like, counts[sort, like]), number)
                counts[sort, like] += 1
        if i == PATTERN:
            if action == "F":
                self.given[chunk] = recorder.number(given) if given is not None else -1
            made = recorder.number(out) if isinstance(out, Tensor) else -1
            known = recorder.chains
            chains = {k: known[first + k] for k in range(len(events)) if first + k in known}
            self.patterns[action, chunk] = Pattern(events, made, chains)
            self.tail = events, len(recorder.events)
        return out

    def _end_of_copies(self, action: str, chunk: int, i: int) -> None:
        """End what the pattern of this action ends of other micro-batches, where they are copies
        and the last micro-batch, which runs for real, has not ended it.
        """
        pattern = self.patterns.get((action, chunk), Pattern([], -1, {}))
        for event in pattern.events:
            place = self.place.get((STORAGE, event.storage)) if isinstance(event, Free) else None
            if place is None:
                continue
            moved = place.of(i)
            number = self.begun.get(moved, -1)
            ended = number in self.over or number in self.handed
            if self.copied(moved.micro_batch) and not ended:
                self.over.add(number)
                self.recorder.events.append(Free(number, ""))

    def close(self) -> None:
        """Add to the pattern what ends until the next action begins."""
        if self.tail is not None:
            events, first = self.tail
            own = {event.storage for event in events if isinstance(event, Alloc)}
            own |= set(self.given.values())
            late = self.recorder.events[first:]
            events += [e for e in late if isinstance(e, Free) and e.storage in own]
            self.tail = None

    def _note(self, place: Place, number: int) -> None:
        self.begun[place] = number
        self.place[place.sort, number] = place
        self.newest[place.line] = max(self.newest.get(place.line, 0), place.micro_batch)

    def copy(
        self, action: str, chunk: int, i: int, make: Callable[[], Tensor] | None,
        full_backward: bool = False,
    ) -> Any:  # fmt: skip
        """Write the events of an action again, for micro-batch i; return what it hands on.

        make: makes the tensor that is handed on, where one is. full_backward: it is a backward with
        its weight gradients, so nothing that recomputation began outlives it.
        """
        self.close()
        pattern, recorder = self.patterns[action, chunk], self.recorder
        counts = Counter[tuple[str, tuple[str | int, ...]]]()
        out: Tensor | None = None
        batches: dict[int, int] = {}
        passing: set[int] = set()

        def begin(event: Event, number: int) -> int:
            """Note that a copy of the pattern's event begins what has this number now."""
            sort, _, like = begins(event) or ("", 0, ())
            self._note(Place(action, chunk, i, sort, like, counts[sort, like]), number)
            counts[sort, like] += 1
            return number

        def now(sort: str, number: int) -> int:
            place = self.place.get((sort, number))
            if place is None:
                return number
            return self.begun.get(place.of(i), number)

        def all_now(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(now(STORAGE, number) for number in numbers)

        event: Any
        for k, event in enumerate(pattern.events):
            kind = type(event)
            if kind is Alloc:
                if event.storage == pattern.out and make is not None:
                    out = make()
                    number = begin(event, recorder.number(out))
                    self.handed.add(number)
                    if action == "B" and (chunk, i) in self.inputs:
                        self.inputs[chunk, i].grad = out  # so it lives as long
                    recorder.events[-1] = event._replace(storage=number)  # where the pattern was
                    continue
                event = event._replace(storage=begin(event, recorder.new_storage(event.bytes)))
                if event.where.place.startswith(PASSING):
                    passing.add(event.storage)
            elif kind is Free:
                if event.storage == self.given.get(chunk):
                    self.inputs.pop((chunk, i), None)  # which frees it for real
                    continue
                number = now(STORAGE, event.storage)
                if number in self.over or number in self.handed:
                    continue  # what was handed on ends for real
                self.over.add(number)
                event = Free(number, event.place)
            elif kind is Launch:
                event = event._replace(read=all_now(event.read), written=all_now(event.written))
            elif kind is Transfer:
                number, place = recorder.new_transfer(event.stream)
                if event.batch >= 0:
                    event = event._replace(batch=batches.setdefault(event.batch, -2 - number))
                event = event._replace(
                    id=begin(event, number), number=place, read=all_now(event.read),
                    written=all_now(event.written),
                )  # fmt: skip
            elif kind is Record:
                event = event._replace(event=begin(event, recorder.new_event()))
            elif kind is Wait:
                event = event._replace(
                    event=now(EVENT, event.event), transfer=now(TRANSFER, event.transfer)
                )
            elif kind is HostWait:
                event = event._replace(
                    event=now(EVENT, event.event), storage=now(STORAGE, event.storage)
                )
            elif kind is RecordStream:
                event = event._replace(storage=now(STORAGE, event.storage))
            elif kind is Action:
                event = Action(event.words.replace(f"micro-batch {PATTERN} ", f"micro-batch {i} "))
            if k in pattern.chains:
                recorder.chains[len(recorder.events)] = pattern.chains[k]
            recorder.events.append(event)
        for number in passing - self.over - self.handed if full_backward else ():
            self.over.add(number)
            recorder.events.append(Free(number, ""))
        if make is not None and out is None:
            out = make()
        return out

    def freed(self, number: int) -> int:
        """Return which storage ends where the tensor of `number` does for real; -1: none."""
        if number not in self.over:
            return number
        found = self._newest(STORAGE, number)
        if found in self.over:
            return -1
        self.over.add(found)
        return found

    def latest(self, transfer: int) -> int:
        """Return which transfer is waited for where `transfer` is for real."""
        return self._newest(TRANSFER, transfer)

    def _newest(self, sort: str, number: int) -> int:
        place = self.place.get((sort, number))
        if place is None or place.micro_batch != PATTERN:
            return number
        return self.begun[place._replace(micro_batch=self.newest[place.line])]


def begins(event: Event) -> tuple[str, int, tuple[str | int, ...]] | None:
    """Return what begins with an event: its sort, its number, and what is the same of its like in
    another micro-batch, where one action may begin more than in the next.
    """
    if isinstance(event, Alloc):
        where = event.where
        return STORAGE, event.storage, (where.phase, where.layer, where.place, event.bytes)
    if isinstance(event, Transfer):
        return TRANSFER, event.id, (event.verb, event.axis, event.where.layer, event.bytes)
    return (EVENT, event.event, (event.place,)) if isinstance(event, Record) else None
