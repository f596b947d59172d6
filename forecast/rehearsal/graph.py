# SPDX-License-Identifier: Apache-2.0
"""Prove from a record what a CUDA graph needs of a step: micro-batches that do the very same thing.

A graph replays launches with the addresses and the numbers of its capture. So in each micro-batch
that has a graph the host may read nothing, and the launches, their order, their shapes, the streams
and the waits between them must repeat. A storage that begins in a micro-batch is compared by its
place among those that begin there, the input and the sum of the losses by the order of their use,
any other by itself. What the record does not have are the numbers that a launch takes by value.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from forecast.device_file import Device
from forecast.rehearsal.events import (
    Action,
    Alloc,
    Event,
    Free,
    HostWait,
    Launch,
    Record,
    Transfer,
    Wait,
)
from forecast.rehearsal.order import Finding
from forecast.rehearsal.record import Recorder
from forecast.rehearsal.roofline import host_seconds
from training.run.cuda_graph import INPUTS, eager
from training.settings.arguments import ParallelConfig

WORDS = re.compile(r"(?:F|B|BW) chunk 0 micro-batch (\d+) .*of iteration (\d+)")
# where what a graph has for itself is made in an eager step: the batch, the sum of the losses
FED = ("training/data/batch.py", "pretrain_llama.py")
Key = tuple[int, int]  # iteration, micro-batch


class GraphReport(NamedTuple):
    """What a step costs the host, and what speaks against graphs.

    calls: launches and collectives of the step. outside: of these, those that no graph has.
    graphs: launches of graphs. compared: micro-batches that were compared with another. events: of
    the step; inside: those that a graph has.
    """

    calls: int
    outside: int
    graphs: int
    compared: int
    findings: list[Finding]
    events: Sequence[Event] = ()
    inside: Sequence[Event] = ()

    def as_json(self) -> dict[str, int]:
        """Return the counts."""
        names = ("calls", "outside", "graphs", "compared")
        return {name: getattr(self, name) for name in names}

    def lines(self, device: Device) -> list[str]:
        """Return the lines of the report."""
        more = self.graphs * (1 + len(INPUTS[:2]))
        after = self.outside + more
        launched, graphed = (
            sum(host_seconds(device, event) for event in events)
            for events in (self.events, self.inside)
        )
        rest = launched - graphed + more * device["launch_seconds"]
        if self.findings:
            return [f"refused: {len(self.findings)} findings of the kind graph"]
        return [
            f"{self.graphs} micro-batches of a step go as a graph each; {self.compared} were "
            "compared, launch by launch",
            f"the host makes {after:,} launches a step instead of {self.calls:,} ({self.outside:,} "
            f"outside of graphs): {1e3 * rest:.1f} ms instead of {1e3 * launched:.1f} ms",
        ]


def prove(
    recorder: Recorder, earlier: Sequence[Event], step: Sequence[Event], parallel: ParallelConfig
) -> GraphReport:
    """Read a record. earlier: the steps before the last one. step: the last one."""
    parts = micro_batches([*earlier, *step])
    last = max((iteration for iteration, _ in parts), default=0)
    count = 1 + max((i for iteration, i in parts if iteration == last), default=-1)
    graphed = [i for i in range(count) if not eager(parallel, i, count)]
    findings: list[Finding] = []
    for i in graphed:
        findings += [
            Finding("graph", e.where.place, f"the host waits in micro-batch {i}: no graph can")
            for e in parts[last, i]
            if isinstance(e, HostWait)
        ]
    pairs: list[tuple[Key, Key]] = [
        ((last, i), (last, j)) for i, j in zip(graphed, graphed[1:], strict=False) if i
    ]
    if 0 in graphed and last > 2:
        pairs.append(((last - 1, 0), (last, 0)))
    for one, other in pairs:
        findings += difference(recorder, parts[one], parts[other], f"{one[1]} and {other[1]}")
    inside = [event for i in graphed for event in parts[last, i]]
    unlike = {(f.kind, f.place, f.what): f for f in findings}
    counts = calls(step), calls(step) - calls(inside), len(graphed), len(pairs)
    return GraphReport(*counts, [*unlike.values()], step, inside)


def calls(events: Iterable[Event]) -> int:
    """Return how many calls the host makes to the device."""
    return sum(isinstance(e, (Launch, Transfer)) for e in events)


def micro_batches(events: Sequence[Event]) -> dict[Key, list[Event]]:
    """Return the events of each micro-batch's forward and backward."""
    found: dict[Key, list[Event]] = defaultdict(list)
    at: Key | None = None
    for event in events:
        if isinstance(event, Action):
            matched = WORDS.match(event.words)
            at = (int(matched[2]), int(matched[1])) if matched else None
        elif at is not None:
            found[at].append(event)
    return found


def difference(
    recorder: Recorder, one: Sequence[Event], other: Sequence[Event], which: str
) -> list[Finding]:
    """Return the finding that is the first difference of two micro-batches, if there is one."""
    a, b = described(recorder, one), described(recorder, other)
    for (x, place), (y, also) in zip(a, b, strict=False):
        if x != y:
            what = f"micro-batches {which} differ: {x[0]} {x[1]}, then {y[0]} {y[1]}"
            if x[:3] == y[:3]:
                what = f"micro-batches {which} use other memory or streams: {x[0]} {x[1]}"
            return [Finding("graph", place, what, also)]
    if len(a) != len(b):
        longer = max(a, b, key=len)
        _, place = longer[min(len(a), len(b))]
        return [Finding("graph", place, f"micro-batches {which}: {len(a)} and {len(b)} events")]
    return []


def described(recorder: Recorder, events: Sequence[Event]) -> list[tuple[tuple[Any, ...], str]]:
    """Return what a graph would hold of these events, and the line of each."""
    own: dict[int, int] = {}
    given: dict[int, int] = {}
    found: list[tuple[tuple[Any, ...], str]] = []

    def names(numbers: Iterable[int]) -> tuple[Any, ...]:
        named: list[Any] = []
        for number in numbers:
            if number in own:
                named.append(("made", own[number]))
            elif recorder.born.get(number, "").startswith(FED):
                named.append(("fed", given.setdefault(number, len(given))))
            else:
                named.append(number)
        return tuple(named)

    for e in events:
        if isinstance(e, Alloc):
            own[e.storage] = len(own)
            found.append((("memory", f"of {e.bytes} bytes", e.stream), e.where.place))
        elif isinstance(e, Free) and e.storage in own:
            pass  # autograd's thread lets the last one go when its next backward begins
        elif isinstance(e, Launch):
            uses = (e.stream, names(e.read), names(e.written), e.spans)
            found.append(((e.op, e.shapes, e.dtypes, *uses), e.where.place))
        elif isinstance(e, Transfer):
            uses = (e.stream, names(e.read), names(e.written), e.spans)
            found.append(((e.verb, e.axis, e.bytes, *uses), e.where.place))
        elif isinstance(e, (Record, Wait)):
            found.append(((type(e).__name__, f"of stream {e.stream}", ""), e.place))
    return found
