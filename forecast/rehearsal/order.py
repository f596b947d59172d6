# SPDX-License-Identifier: Apache-2.0
"""Find what one rank's streams may do in the wrong order, by vector clocks over its record.

A clock is how far one timeline knows the others: the streams, and the host as one more. Work that
is put on a stream comes after all that the stream did or waited for, and after all that the host
had seen by then. An event and a transfer's end carry the clock of their stream to whoever waits.
Two uses of the same bytes, one of them a write, must be in order by these clocks. So must a
storage's uses and its end: the memory goes back to the stream on which it was allocated, whose next
work may be given it at once. `record_stream` excuses a stream from that.

A transfer runs on its communicator's stream. torch's own Work keeps its tensors until its wait.
Here Weft's Handle keeps them, and a tensor that ends before is a mistake. So is a use of its
tensors before somebody waited for that very transfer, even where a later one of the communicator
was waited for: only NCCL's one stream orders the two then, and gloo, which has none, does not.
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
Clock = dict[int, int]  # timeline -> how many of its uses are known to be over


class Finding(NamedTuple):
    """One mistake. place: file:line. also: the other place of two that do not fit together.

    through: the lines of the product that led to the two, innermost first.
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
    event: int  # its index


class Storage:
    """The latest uses of a storage, by timeline. home: the stream that allocated it."""

    def __init__(self, home: int) -> None:
        self.home = home
        self.ticks: Clock = {}  # timeline -> its latest use
        self.uses: dict[tuple[int, bool], dict[tuple[int, int], Use]] = {}  # timeline, written
        self.recorded: set[int] = set()  # streams of record_stream
        self.pending: dict[int, list[tuple[Use, bool]]] = {}  # transfers not known to be over


class Order:
    """The clocks of a rank while its record is read, and what was found."""

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
        """Let a timeline know all that another clock knows."""
        own = self.clock(timeline)
        for at, tick in (other or {}).items():
            if own.get(at, 0) < tick:
                own[at] = tick

    def use(self, index: int, timeline: int, event: Launch | Transfer | HostUse) -> None:
        """Note what an event reads and writes, and compare it with what other timelines did."""
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
        """Note that a storage ends, and whether a timeline may still use it."""
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
                "allocated it, which has not waited for that"
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
        """Read the record; return what is wrong, each pair of places once."""
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
    """Return the pairs of uses that nothing orders, and the frees that come too early."""
    return Order(events, chains).read()


def place_of(event: Any) -> str:
    """Return the line of an event."""
    return str(event.where.place if hasattr(event, "where") else event.place)


def who(event: Any) -> str:
    """Return what an event is, in words."""
    if isinstance(event, HostUse):
        return "the host"
    if isinstance(event, Transfer):
        return f"the {event.verb} over {event.axis}"
    return f"{event.op} on stream {event.stream}"
