# SPDX-License-Identifier: Apache-2.0
"""A step of all micro-batches, from the record of a step of few.

A rehearsal runs as few micro-batches as have each kind of moment that a step of all of them has
(forecast.recording.few_micro_batches); the memory is theirs. Launches, transfers and time are those
of all: the schedule of all micro-batches is followed, and each of its actions does what the record
has for it.

    micro-batch of all     0 ... m-1     m ... m + more     m + more + 1 ... last
    micro-batch recorded   0 ... m-1           m                 m + 1 ... last

m is one in the middle, `more` how many are not recorded. A wait for what another micro-batch has
begun is for what the micro-batch as far away begins at the same place of its action. An action
posts the receive of a later one; in an interleaved pipeline repeated ones post it from m's peer.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forecast.recording import ACTION
from forecast.rehearsal.events import Action, Event, HostWait, Record, Transfer, Wait
from mpu.pipeline.schedules import Schedule

MESSAGE = re.compile(r"^([FB] of stage \d+, )(\d+):")  # a label, with its micro-batch
Key = tuple[str, int, int]  # F, B or W, chunk, micro-batch
Id = tuple[str, int]  # "transfer", "batch" or "event", and a number


class Place(NamedTuple):
    """Where something begins: as the k-th of its sort in an action of a recorded micro-batch."""

    sort: str
    kind: str
    chunk: int
    micro_batch: int
    k: int


def whole_step(events: Sequence[Event], schedule: Schedule, rank: int, few: int) -> list[Event]:
    """Return the events of a step of all micro-batches, in the order of their schedule.

    events: of a step of `few` micro-batches, on a rank of the pipeline.
    """
    count = 1 + max(action.micro_batch for action in schedule.ranks[rank])
    if count == few:
        return list(events)
    head, parts, tail = cut(events)
    names, found = Names(parts, few // 2, count - few), list[Event]()
    found += (names.named(event, 0) for event in head)
    for kind, chunk, i in schedule.ranks[rank]:
        recorded = names.recorded(i)
        for event in parts.get((kind, chunk, recorded), ()):
            if type(event) is Action:
                event = Action(event.words.replace(f"micro-batch {recorded} ", f"micro-batch {i} "))
            found.append(names.named(event, i - recorded))
    return [*found, *(names.named(event, count - few) for event in tail)]


def cut(events: Sequence[Event]) -> tuple[list[Event], dict[Key, list[Event]], list[Event]]:
    """Return what comes before a step's actions, what each does, and what comes after them."""
    head, parts, tail = list[Event](), defaultdict[Key, list[Event]](list), list[Event]()
    now = head
    for event in events:
        if type(event) is Action:
            if named := ACTION.search(event.words):  # or it waits for that action's input
                now = parts[named[1][0], int(named[2]), int(named[3])]
            elif parts:
                now = tail
        now.append(event)
    return head, parts, tail


def begins(event: Event) -> list[Id]:
    """Return what begins with an event."""
    if type(event) is Transfer:
        return [("transfer", event.id), ("batch", event.batch)]
    return [("event", event.event)] if type(event) is Record else []


class Names:
    """Numbers for what begins in each micro-batch: those of the record, and new ones from the
    repeated one on.
    """

    def __init__(self, parts: Mapping[Key, Sequence[Event]], middle: int, more: int) -> None:
        self.middle, self.more = middle, more
        self.place: dict[Id, Place] = {}
        self.at: dict[Place, int] = {}
        for (kind, chunk, i), part in parts.items():
            counts = Counter[str]()
            for sort, number in dict.fromkeys(one for event in part for one in begins(event)):
                place = Place(sort, kind, chunk, i, counts[sort])
                self.place[sort, number], self.at[place] = place, number
                counts[sort] += 1
        self.new: dict[tuple[Id, int], int] = {}
        self.next = 1 + max((number for _, number in self.place), default=0)
        self.turns: dict[int, int] = {}  # of the next transfer on each communicator's stream

    def recorded(self, i: int) -> int:
        """Return which recorded micro-batch stands for one of all."""
        return i if i <= self.middle else max(self.middle, i - self.more)

    def number(self, sort: str, number: int, away: int) -> int:
        """Return the number of what the record has under this one, so many micro-batches later."""
        place = self.place.get((sort, number))
        if number < 0 or place is None or not away:
            return number
        i = place.micro_batch + away
        there = self.at.get(place._replace(micro_batch=self.recorded(i)), number)
        if i == self.recorded(i):
            return there
        key = (sort, there), i
        if key not in self.new:
            self.new[key], self.next = self.next, self.next + 1
        return self.new[key]

    def named(self, event: Any, away: int) -> Event:
        """Return an event of the record, so many micro-batches later."""
        if type(event) is Transfer:
            turn = self.turns.setdefault(event.stream, event.number)
            self.turns[event.stream] = turn + 1
            one, batch = (self.number(*each, away) for each in begins(event))
            label = MESSAGE.sub(lambda m: f"{m[1]}{int(m[2]) + away}:", event.label)
            event = event._replace(id=one, batch=batch, number=turn, label=label)
        elif type(event) is Wait:
            which = self.number("event", event.event, away)
            transfer = self.number("transfer", event.transfer, away)
            event = event._replace(event=which, transfer=transfer)
        elif isinstance(event, (Record, HostWait)):
            event = event._replace(event=self.number("event", event.event, away))
        named: Event = event
        return named
