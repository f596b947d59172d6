# SPDX-License-Identifier: Apache-2.0
"""Match the records of all ranks of a small world: find mismatched transfers and deadlocks.

Each rank's host enqueues work on its streams in the order of its record, and stops at a wait. A
stream runs its items in order. A transfer waits for earlier work of its origin stream, then for its
peers to reach the same transfer of the same communicator. A collective completes when all its ranks
have arrived, a message when both ends have, a batch when all its messages have. This is simulated
until nothing advances. Transfers that are blocked then would also be blocked on NCCL: a deadlock.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from forecast.rehearsal.events import Event, HostWait, Record, Transfer, Wait
from forecast.rehearsal.order import Finding
from forecast.rehearsal.record import Recorder

MESSAGES = ("send", "receive")
MATCHED = (Transfer, Record, Wait, HostWait)  # the events that are needed
Chains = dict[tuple[str, str], tuple[str, ...]]  # (place, verb) -> call stack
OVER = {"send": "receive", "receive": "send"}


class Item(NamedTuple):
    """An item on a stream: transfers that run as one, a mark, or a wait.

    after: (origin stream, number of its items) for which transfers wait.
    """

    transfers: tuple[Transfer, ...]
    mark: int = -1
    wait: Wait | None = None
    after: tuple[int, int] = (-1, 0)


class Rank:
    """A rank's host and its streams. at: index of the host's next event."""

    def __init__(self, number: int, events: Sequence[Event]) -> None:
        self.number = number
        self.events = [e for e in events if isinstance(e, MATCHED)]
        self.at = 0
        self.streams: dict[int, deque[Item]] = defaultdict(deque)
        self.put: dict[int, int] = defaultdict(int)  # items enqueued on each stream so far
        self.done: dict[int, int] = defaultdict(int)  # items of each stream that are complete
        self.marks: set[int] = set()  # events that are reached
        self.over: set[int] = set()  # transfers that are complete

    def add(self, stream: int, item: Item) -> None:
        self.streams[stream].append(item)
        self.put[stream] += 1

    def host(self) -> bool:
        """Enqueue work on the streams until the host waits; return whether there was any."""
        began = self.at
        while self.at < len(self.events):
            event = self.events[self.at]
            if isinstance(event, HostWait):
                if not self._reached(event):
                    break
            elif isinstance(event, Transfer):
                batch = [event]
                while event.batch != -1 and self.at + 1 < len(self.events):
                    following = self.events[self.at + 1]
                    if not isinstance(following, Transfer) or following.batch != event.batch:
                        break
                    batch.append(following)
                    self.at += 1
                after = event.origin, self.put[event.origin]
                self.add(event.stream, Item(tuple(batch), after=after))
            elif isinstance(event, Record):
                self.add(event.stream, Item((), mark=event.event))
            else:
                self.add(event.stream, Item((), wait=event))
            self.at += 1
        return self.at > began

    def _reached(self, event: HostWait) -> bool:
        if event.event >= 0:
            return event.event in self.marks
        streams = [event.stream] if event.stream >= 0 else list(self.streams)
        return not any(self.streams[stream] for stream in streams)

    def local(self) -> bool:
        """Complete the first items of streams that need no peer; return whether there were any."""
        moved = False
        for stream, items in list(self.streams.items()):
            while items and not items[0].transfers:
                wait = items[0].wait
                if wait is None:
                    self.marks.add(items[0].mark)
                elif wait.event >= 0 and wait.event not in self.marks:
                    break
                elif wait.event < 0 and wait.transfer not in self.over:
                    break
                self.pop(stream)
                moved = True
        return moved

    def pop(self, stream: int) -> None:
        """Remove the first item of a stream, which is complete."""
        item = self.streams[stream].popleft()
        self.done[stream] += 1
        self.over.update(transfer.id for transfer in item.transfers)

    def ready(self) -> dict[str, tuple[int, Item]]:
        """Return (stream, item) of the transfers that wait only for peers, by communicator."""
        found = {}
        for stream, items in self.streams.items():
            if items and items[0].transfers:
                origin, count = items[0].after
                if self.done[origin] >= count:
                    found[items[0].transfers[0].communicator] = stream, items[0]
        return found


class World:
    """All ranks, and the findings."""

    def __init__(self, records: Sequence[Sequence[Event]], chains: Sequence[Chains] = ()) -> None:
        self.chains = {key: lines for one in chains for key, lines in one.items()}
        self.ranks = [Rank(number, events) for number, events in enumerate(records)]
        self.found: dict[tuple[str, str, str], Finding] = {}
        self.met: set[tuple[int, int]] = set()  # (rank, transfer) of messages that are matched

    def note(self, kind: str, one: Transfer, what: str, other: Transfer | None) -> None:
        place, also = one.where.place, other.where.place if other else ""
        ways = [self.chains.get((e.where.place, e.verb), ()) for e in (one, other) if e]
        through = tuple(dict.fromkeys(line for way in ways for line in way))
        self.found.setdefault((kind, place, also), Finding(kind, place, what, also, through))

    def run(self) -> list[Finding]:
        """Run all ranks until nothing advances; return the mismatches and deadlocks."""
        moving = True
        while moving:
            moving = False
            for rank in self.ranks:
                while rank.host() | rank.local():
                    moving = True
            heads = [rank.ready() for rank in self.ranks]
            for number, ready in enumerate(heads):
                for name, (stream, item) in ready.items():
                    first = item.transfers[0]
                    items = self.ranks[number].streams[stream]
                    if not items or items[0] is not item:
                        continue  # it was completed together with a peer's
                    if first.verb in MESSAGES:
                        moving |= self._messages(number, item, heads)
                    elif first.group[0] == number:
                        moving |= self._collective(name, item, heads)
        self._stuck()
        return list(self.found.values())

    def _collective(self, name: str, item: Item, heads: list[Any]) -> bool:
        one = item.transfers[0]
        if any(name not in heads[rank] for rank in one.group):
            return False
        for rank in one.group[1:]:
            stream, there = heads[rank][name]
            other = there.transfers[0]
            if other.verb in MESSAGES:
                return False
            if signature(one) != signature(other):
                what = f"rank {one.group[0]}: {words(one)}; rank {rank}: {words(other)}"
                self.note("mismatch", one, what, other)
        for rank in one.group:
            self.ranks[rank].pop(heads[rank][name][0])
        return True

    def _messages(self, number: int, item: Item, heads: list[Any]) -> bool:
        moved = False
        for one in item.transfers:
            there = heads[one.peer].get(one.communicator)
            if (number, one.id) in self.met or there is None:
                continue
            stream, across = there
            for other in across.transfers:
                fits = other.verb == OVER.get(one.verb) and other.peer == number
                if fits and (one.peer, other.id) not in self.met:
                    self.met |= {(number, one.id), (one.peer, other.id)}
                    moved = True
                    if signature(one) != signature(other):
                        what = f"rank {number}: {words(one)}; rank {one.peer}: {words(other)}"
                        self.note("mismatch", one, what, other)
                    break
        for rank in {number, *(one.peer for one in item.transfers)}:
            found = heads[rank].get(item.transfers[0].communicator)
            if found is not None:
                stream, there = found
                first = self.ranks[rank].streams[stream]
                if first and first[0] is there:
                    if all((rank, each.id) in self.met for each in there.transfers):
                        self.ranks[rank].pop(stream)
                        moved = True
        return moved

    def _stuck(self) -> None:
        for rank in self.ranks:
            for name, (_, item) in rank.ready().items():
                for one in item.transfers:
                    if (rank.number, one.id) in self.met:
                        continue
                    others = [one.peer] if one.peer >= 0 else one.group
                    for other in others:
                        if other == rank.number:
                            continue
                        at = self._current(other, name)
                        if at is not None and signature(at) == signature(one) and one.peer < 0:
                            continue  # that rank has arrived
                        what = f"rank {rank.number} waits for rank {other} in {words(one)}; rank "
                        end = f"is at {words(at)} ({at.where.place})" if at else "has ended"
                        what += f"{other} {end}"
                        self.note("deadlock", one, what, at)

    def _current(self, number: int, name: str) -> Transfer | None:
        """Return a transfer at which a rank is blocked, of communicator `name` if possible."""
        ready = self.ranks[number].ready()
        if name in ready:
            return ready[name][1].transfers[0]
        for _, item in ready.values():
            return item.transfers[0]
        return None


def chains_of(recorder: Recorder) -> Chains:
    """Return the call stacks of a record's transfers."""
    events = recorder.events
    return {
        (event.where.place, event.verb): lines
        for index, lines in recorder.chains.items()
        if index < len(events) and type(event := events[index]) is Transfer
    }


def match(records: Sequence[Sequence[Event]], chains: Sequence[Chains] = ()) -> list[Finding]:
    """Return the mismatches and deadlocks among the ranks' records.

    chains: call stacks of each rank's transfers.
    """
    return [*World(records, chains).run(), *crossed(records)]


def crossed(records: Sequence[Sequence[Event]]) -> list[Finding]:
    """Return collectives of two communicators that two ranks start in different orders.

    Each may occupy SMs on one of the ranks and so keep the other from starting: a deadlock.
    """
    found: dict[tuple[str, str], Finding] = {}
    orders = [
        [e for e in events if isinstance(e, Transfer) and e.verb not in MESSAGES]
        for events in records
    ]
    for a in range(len(records)):
        for b in range(a + 1, len(records)):
            ours = [e for e in orders[a] if b in e.group]
            theirs = [e for e in orders[b] if a in e.group]
            for one, other in zip(ours, theirs, strict=False):
                if (one.communicator, one.number) != (other.communicator, other.number):
                    what = (
                        f"rank {a} starts {words(one)} where rank {b} starts {words(other)}: "
                        "two communicators in different orders"
                    )
                    kind, place, also = "order", one.where.place, other.where.place
                    found.setdefault((place, also), Finding(kind, place, what, also))
                    break
    return list(found.values())


def signature(one: Transfer) -> tuple[Any, ...]:
    """Return the properties on which both ends of a transfer must agree."""
    verb = "message" if one.verb in MESSAGES else one.verb
    return verb, one.dtype, one.shape, one.op, one.label


def words(one: Transfer) -> str:
    """Return a transfer as text."""
    peer = {"send": f" to {one.peer}", "receive": f" from {one.peer}"}.get(one.verb, "")
    label = f", {one.label}" if one.label else ""
    return f"{one.verb}{peer} over {one.axis} of {one.dtype} {list(one.shape)}{label}"
