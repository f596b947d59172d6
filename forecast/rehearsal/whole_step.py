# SPDX-License-Identifier: Apache-2.0
"""Build the events of a step of all micro-batches from the record of a step of few.

A rehearsal runs the least number of micro-batches that has each kind of moment of the whole step
(forecast.recording.few_micro_batches); memory is reported for these. Launches, transfers and time
are reported for all micro-batches: this module follows the schedule of all of them and inserts the
recorded events of each action.

    micro-batch of all     0 ... m-1     m ... m + more     m + more + 1 ... last
    micro-batch recorded   0 ... m-1           m                 m + 1 ... last

m is in the middle; `more` is the number of micro-batches that are not recorded. If a recorded wait
is for an event of the micro-batch k places away, the wait here is for the corresponding event k
places away. An action posts the receive of a later one; in an interleaved pipeline a repeated
action posts it from the same peer as m's.
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
Id = tuple[str, int]  # "transfer", "batch" or "event", and its number


class Place(NamedTuple):
    """The k-th transfer, batch or event (`sort`) in an action of a recorded micro-batch."""

    sort: str
    kind: str
    chunk: int
    micro_batch: int
    k: int


def whole_step(events: Sequence[Event], schedule: Schedule, rank: int, few: int) -> list[Event]:
    """Return the events of a step of all micro-batches, in the order of their schedule.

    events: recorded events of a step of `few` micro-batches. rank: of the pipeline.
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
    """Return the events before a step's F, B and W, those of each of them, and those after."""
    head, parts, tail = list[Event](), defaultdict[Key, list[Event]](list), list[Event]()
    now = head
    for event in events:
        if type(event) is Action:
            if named := ACTION.search(event.words):  # also "waiting for" that action's input
                now = parts[named[1][0], int(named[2]), int(named[3])]
            elif parts:
                now = tail
        now.append(event)
    return head, parts, tail


def begins(event: Event) -> list[Id]:
    """Return the numbers that an event introduces."""
    if type(event) is Transfer:
        return [("transfer", event.id), ("batch", event.batch)]
    return [("event", event.event)] if type(event) is Record else []


class Names:
    """Numbers of the transfers, batches and events in each micro-batch.

    They are the record's up to the middle micro-batch, and new ones in its repetitions.
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
        self.turns: dict[int, int] = {}  # communicator's stream -> number of its next transfer

    def recorded(self, i: int) -> int:
        """Return the recorded micro-batch that represents micro-batch i of all."""
        return i if i <= self.middle else max(self.middle, i - self.more)

    def number(self, sort: str, number: int, away: int) -> int:
        """Return the number that replaces a recorded one, `away` micro-batches later."""
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
        """Return a recorded event with the numbers that it has `away` micro-batches later."""
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
