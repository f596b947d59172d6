# SPDX-License-Identifier: Apache-2.0
"""Find exposed transfers and copies that a matmul could hide.

An asynchronous transfer is meant to overlap computation. It is exposed if no matmul runs between
its start and the computing stream's wait for it. This is unavoidable if the matmul before it
computes the sent data, and the matmul after it reads the received data. It is avoidable

    by an earlier start    if the matmul before it does not compute the sent data
    by a later wait        if the matmul after it does not read the received data

Only matmuls of the same action (a micro-batch's forward, backward or W) count, and only those
larger than a router's. A recomputed forward starts from saved activations, so no matmul comes
before it. Dependencies are traced from storage to storage through the launches in between. A
finding is a line of which, in one phase, more than half of the transfers of a step could be hidden.
A copy between host and device is a transfer, too; a copy on the computing stream is never hidden.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from forecast.rehearsal.events import Action, Event, HostWait, Launch, Record, Transfer, Wait
from forecast.rehearsal.order import Finding
from forecast.rehearsal.places import phase_of

if TYPE_CHECKING:
    from forecast.rehearsal.run import Rehearsed

LEAST = 0.02  # share of the FLOPs of a step's largest matmul, from which a matmul counts
LARGE = 1 << 12  # bytes from which a copy on the computing stream is reported
Line = tuple[str, str, str]  # file:line, phase, label
AGAIN = "recompute"
PASSES = ("forward", "backward")  # not W, which only fills bubbles


class Started(NamedTuple):
    """A transfer or copy in flight: index of its event, and number of matmuls before it."""

    at: int
    products: int


def exposed(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the lines whose transfers in the last step are exposed and could be hidden."""
    events, chains = seen.recorder.events, seen.recorder.chains
    every, could = Counter[Line](), defaultdict[Line, list[tuple[int, str]]](list)
    started: dict[int, Started] = {}  # transfers in flight, by id
    copying = defaultdict[int, list[Started]](list)  # copies in flight without an event, by stream
    marks: dict[int, list[Started]] = {}  # copies in flight, by the event recorded behind them
    brought: dict[int, tuple[int, ...]] = {}  # transfer's id -> the storages that it writes
    products, phase, is_large = 0, "", Large(events[seen.first : seen.end])
    for index in range(seen.first, seen.end):
        event, waited = events[index], list[Started]()
        if type(event) is Action:
            phase = phase_of(event.words)
        elif type(event) is Launch and event.op.startswith("memcpy"):
            if event.stream:
                copying[event.stream].append(Started(index, products))
            elif event.bytes >= LARGE and "float" in event.dtype and (  # an index is small work
                phase in (*PASSES, "wgrad")
                or (phase == "update" and type(events[index + 1]) is not HostWait)  # the host's own
            ):
                what = f"{event.op} of {event.bytes:,} bytes on the compute stream"
                yield Finding("overlap", event.where.place, what, "", chains.get(index, ()))
        elif type(event) is Launch:
            products += is_product(event)
        elif type(event) is Transfer:
            if event.is_async:
                started[event.id] = Started(index, products)
            brought[event.id] = event.written
        elif type(event) is Record and event.stream in copying:
            marks[event.event] = copying.pop(event.stream)
        elif type(event) is Wait and event.stream == 0:
            if event.event < 0:
                waited = [started.pop(event.transfer)] if event.transfer in started else []
            else:
                waited = marks.pop(event.event, [])
        for one in waited if phase in PASSES else ():
            line = line_of(events[one.at])
            every[line] += 1
            if one.products == products and (
                how := cure(events, one.at, index, brought, is_large)
            ):
                could[line].append((one.at, how))
    for line, some in could.items():
        if 2 * len(some) > every[line]:
            (index, how), place = some[-1], line[0]
            what = f"{len(some)} of {every[line]} {words(events[index])} have no matmul between "
            what += f"start and wait, and could have one by {how}"
            chain = chains.get(index, ())
            through = dict.fromkeys(line for i, _ in some for line in chains.get(i, ()))
            place = place or (*chain, "")[0]
            caller = chain[chain.index(place) + 1 :] if place in chain else chain
            yield Finding("overlap", place, what, (*caller, "")[0], tuple(through))


def is_product(event: Launch | Transfer) -> bool:
    """Return whether an event is a matmul on the computing stream."""
    return isinstance(event, Launch) and event.stream == 0 and event.flops > 0


class Large:
    """Tests whether an event is a matmul large enough to hide a transfer. step: its events."""

    def __init__(self, step: Sequence[Event]) -> None:
        self.least = LEAST * max((e.flops for e in step if isinstance(e, Launch)), default=0.0)

    def __call__(self, event: Launch | Transfer) -> bool:
        """Return whether an event is such a matmul."""
        return isinstance(event, Launch) and event.stream == 0 and event.flops > self.least


def cure(
    events: Sequence[Event], start: int, wait: int, brought: Mapping[int, tuple[int, ...]],
    is_large: Large,
) -> str:  # fmt: skip
    """Return, as text, the change that would hide a transfer; "" if there is none.

    start, wait: indices of its start and of the wait for it. brought: storages that each transfer
    writes.
    """
    event = events[start]
    assert isinstance(event, (Launch, Transfer))
    sends = isinstance(event, Launch) or event.verb != "receive"
    if sends and could_start_before(events, start, brought, is_large):
        return "an earlier start"
    return "a later wait" if could_end_after(events, wait, event.written, is_large) else ""


def could_start_before(
    events: Sequence[Event], start: int, brought: Mapping[int, tuple[int, ...]],
    is_large: Large,
) -> bool:  # fmt: skip
    """Return whether the action has a large matmul before a transfer that does not feed it.

    brought: storages that each transfer writes. The search ends at a wait for a transfer on which
    the sent data depends.
    """
    own = events[start]
    assert isinstance(own, (Launch, Transfer))
    needs = set(own.read)
    for index in range(start - 1, -1, -1):
        event = events[index]
        if type(event) is Action:
            return False
        if type(event) is Wait and not needs.isdisjoint(brought.get(event.transfer, ())):
            return False
        if not isinstance(event, (Launch, Transfer)):
            continue
        makes = not needs.isdisjoint(event.written)
        if AGAIN in (event.where.phase, own.where.phase) and event.where.phase != own.where.phase:
            return False
        if makes and is_product(event):
            return False
        if makes:
            needs.update(event.read)
        elif is_large(event):
            return True
    return False


def could_end_after(
    events: Sequence[Event], wait: int, brought: tuple[int, ...], is_large: Large
) -> bool:
    """Return whether a large matmul that does not need the received data follows the wait.

    brought: storages that the transfer writes.
    """
    made = set(brought)
    for index in range(wait + 1, len(events)):
        event = events[index]
        if type(event) is Action:
            return False
        if isinstance(event, (Launch, Transfer)):
            if not made.isdisjoint(event.read):
                if isinstance(event, Transfer) or is_product(event):
                    return False
                made.update(event.written)
            elif is_large(event):
                return True
    return False


def line_of(event: Event) -> Line:
    """Return the line, the phase and the label of a transfer or a copy."""
    assert isinstance(event, (Launch, Transfer))
    label = event.label if isinstance(event, Transfer) else event.op
    return event.where.place, event.where.phase, label


def words(event: Event) -> str:
    """Return a transfer or a copy as text."""
    if isinstance(event, Transfer):
        return f"{event.verb} over {event.axis} ({event.label or 'no label'})"
    assert isinstance(event, Launch)
    return event.op
