# SPDX-License-Identifier: Apache-2.0
"""Find data races between one rank's streams, by vector clocks over its record.

A timeline is a stream or the host. Its clock holds how many uses of each other timeline are known
to be complete. Work enqueued on a stream comes after all earlier work and waits of that stream, and
after all that the host had synchronized with. Events and transfers pass the clock of their stream
to the timelines that wait for them. Two uses of the same bytes, at least one of them a write, must
be ordered by these clocks. So must the uses of a storage and its end: its memory returns to the
stream that allocated it, and that stream's next work may reuse it at once. `record_stream` exempts
a stream from this.

A transfer runs on its communicator's stream. torch's own Work keeps the tensors alive until it is
waited for. Here Weft's Handle must keep them; a tensor freed before is a mistake. It is also a
mistake to use the tensors before a wait for this very transfer, even after a wait for a later one
of the communicator: only NCCL's single stream would order the two, and gloo has none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forecast.rehearsal.events import (
    Alloc,
    Event,
    Free,
    HostUse,
    HostWait,
    Launch,
    Polled,
    Record,
    RecordStream,
    Transfer,
    Wait,
)

HOST = -1
Clock = dict[int, int]  # timeline -> number of its uses that are known to be complete


class Finding(NamedTuple):
    """One mistake. place: file:line. also: a second place, if two uses conflict, or "".

    through: call stacks of both places, innermost first; only lines of the product.
    """

    kind: str
    place: str
    what: str
    also: str = ""
    through: tuple[str, ...] = ()


class Use(NamedTuple):
    """One use of bytes [low, high) of a storage."""

    low: int
    high: int
    tick: int
    event: int  # index of the event


class Storage:
    """The latest uses of a storage, by timeline. home: the stream that allocated it."""

    def __init__(self, home: int) -> None:
        self.home = home
        self.ticks: Clock = {}  # timeline -> its latest use
        self.uses: dict[tuple[int, bool], dict[tuple[int, int], Use]] = {}  # timeline, written
        self.recorded: set[int] = set()  # streams of record_stream
        self.pending: dict[int, list[tuple[Use, bool]]] = {}  # uses by transfers without a wait


class Order:
    """The clocks of a rank while its record is read, and the findings."""

    def __init__(self, events: Sequence[Event], chains: Mapping[int, tuple[str, ...]]) -> None:
        self.events, self.chains = events, chains
        self.clocks: dict[int, Clock] = {HOST: {HOST: 0}}
        self.marks: dict[int, Clock] = {}  # events
        self.ends: dict[int, Clock] = {}  # transfers
        self.storages: dict[int, Storage] = {}
        self.over: set[int] = set()  # transfers that a stream or the host has waited for
        self.found: dict[tuple[str, str, str], Finding] = {}

    def clock(self, timeline: int) -> Clock:
        return self.clocks.setdefault(timeline, {timeline: 0})

    def join(self, timeline: int, other: Clock | None) -> None:
        """Merge another clock into a timeline's."""
        own = self.clock(timeline)
        for at, tick in (other or {}).items():
            if own.get(at, 0) < tick:
                own[at] = tick

    def use(self, index: int, timeline: int, event: Launch | Transfer | HostUse) -> None:
        """Record the uses of an event, and compare them with the uses by other timelines."""
        clock = self.clock(timeline)
        clock[timeline] += 1
        every = [(number, False) for number in event.read]
        every += [(number, True) for number in event.written]
        spans = event.spans or ((0, 1 << 62),) * len(every)
        for (number, writes), span in zip(every, spans, strict=True):
            storage = self.storages.setdefault(number, Storage(timeline))
            use = Use(*span, clock[timeline], index)
            for other, tick in storage.ticks.items():
                if other != timeline and clock.get(other, 0) < tick:
                    self._compare(storage, other, clock.get(other, 0), use, writes)
            self._unwaited(storage, timeline, use, writes)
            if isinstance(event, Transfer):
                storage.pending.setdefault(event.id, []).append((use, writes))
            storage.ticks[timeline] = use.tick
            storage.uses.setdefault((timeline, writes), {})[span] = use

    def _compare(self, storage: Storage, other: int, known: int, use: Use, writes: bool) -> None:
        for wrote in (True, False) if writes else (True,):
            for earlier in storage.uses.get((other, wrote), {}).values():
                if known < earlier.tick and earlier.low < use.high and use.low < earlier.high:
                    self._race(earlier, wrote, other, use, writes)

    def _unwaited(self, storage: Storage, timeline: int, use: Use, writes: bool) -> None:
        for number in list(storage.pending):
            if number in self.over:
                del storage.pending[number]
                continue
            for earlier, wrote in storage.pending[number]:
                one = self.events[earlier.event]
                other_stream = isinstance(one, Transfer) and one.stream != timeline
                if other_stream and (writes or wrote):
                    if earlier.low < use.high and use.low < earlier.high:
                        self._race(earlier, wrote, timeline, use, writes)

    def _race(self, earlier: Use, wrote: bool, other: int, use: Use, writes: bool) -> None:
        first, second = self.events[earlier.event], self.events[use.event]
        verb = "writes" if writes else "reads"
        did = "writes" if wrote else "reads"
        what = f"{who(second)} {verb} what {who(first)} {did} at {place_of(first)}, without a wait"
        self._note("order", what, use.event, earlier.event)

    def end(self, index: int, event: Free) -> None:
        """Record that a storage ends; check that no timeline may still use it."""
        storage = self.storages.pop(event.storage, None)
        if storage is None:
            return
        for number, uses in storage.pending.items():
            if number not in self.over:
                one = self.events[uses[0][0].event]
                if isinstance(one, Transfer) and one.stream not in storage.recorded:
                    what = f"memory of {who(one)} at {place_of(one)} is freed without a wait"
                    self._note("free", what, index, uses[0][0].event)
        known, host = self.clock(storage.home), self.clock(HOST)
        for other, tick in storage.ticks.items():
            seen = max(known.get(other, 0), host.get(other, 0))
            if other in (storage.home, HOST, *storage.recorded) or seen >= tick:
                continue
            found = [storage.uses.get((other, w), {}).values() for w in (True, False)]
            latest = max((use for some in found for use in some), key=lambda use: use.tick)
            user = self.events[latest.event]
            what = (
                f"memory that {who(user)} uses at {place_of(user)} is freed for the stream that "
                "allocated it, which has not waited for this use"
            )
            self._note("free", what, index, latest.event)

    def _note(self, kind: str, what: str, index: int, other: int) -> None:
        place, also = place_of(self.events[index]), place_of(self.events[other])
        through = (*self.chains.get(index, ()), *self.chains.get(other, ()))
        self.found.setdefault((kind, place, also), Finding(kind, place, what, also, through))

    def _host_waits(self, event: HostWait) -> None:
        if event.event >= 0:
            self.join(HOST, self.marks.get(event.event))
            return
        if event.stream < 0:
            self.over.update(self.ends)
        for timeline in [event.stream] if event.stream >= 0 else list(self.clocks):
            self.join(HOST, self.clock(timeline))

    def read(self) -> list[Finding]:
        """Read the record; return the findings, one for each pair of places."""
        for index, event in enumerate(self.events):
            if isinstance(event, Launch):
                self.join(event.stream, self.clocks[HOST])
                self.use(index, event.stream, event)
            elif isinstance(event, Alloc):
                self.storages[event.storage] = Storage(event.stream)
            elif isinstance(event, Free):
                self.end(index, event)
            elif isinstance(event, Transfer):
                self.join(event.stream, self.clocks[HOST])
                self.join(event.stream, self.clock(event.origin))
                self.use(index, event.stream, event)
                self.ends[event.id] = dict(self.clocks[event.stream])
            elif isinstance(event, Record):
                self.join(event.stream, self.clocks[HOST])
                self.marks[event.event] = dict(self.clock(event.stream))
            elif isinstance(event, Wait) and event.event >= 0:
                self.join(event.stream, self.marks.get(event.event))
            elif isinstance(event, Wait | Polled):
                self.over.add(event.transfer)
                timeline = event.stream if isinstance(event, Wait) else HOST
                self.join(timeline, self.ends.get(event.transfer))
            elif isinstance(event, HostWait):
                self._host_waits(event)
            elif isinstance(event, HostUse):
                self.use(index, HOST, event)
            elif isinstance(event, RecordStream) and event.storage in self.storages:
                self.storages[event.storage].recorded.add(event.stream)
        return list(self.found.values())


def order(events: Sequence[Event], chains: Mapping[int, tuple[str, ...]]) -> list[Finding]:
    """Return the unordered pairs of uses, and the frees that come too early."""
    return Order(events, chains).read()


def place_of(event: Any) -> str:
    """Return the line of an event."""
    return str(event.where.place if hasattr(event, "where") else event.place)


def who(event: Any) -> str:
    """Return an event as text."""
    if isinstance(event, HostUse):
        return "the host"
    if isinstance(event, Transfer):
        return f"the {event.verb} over {event.axis}"
    return f"{event.op} on stream {event.stream}"
