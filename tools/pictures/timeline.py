# SPDX-License-Identifier: Apache-2.0
"""Compute from a timeline, simulated or measured, what ranks hold and wait for, and the bubble."""

from collections.abc import Sequence
from typing import NamedTuple

from mpu.pipeline.schedules import Schedule
from mpu.pipeline.simulate import Span, Timeline


class InFlight(NamedTuple):
    """The activations held for B's and W's from `time` on, one for each stage and micro-batch."""

    time: float
    for_b: int
    for_w: int


class Summary(NamedTuple):
    """The numbers of a timeline; from `busy` on with one entry for each rank."""

    step: float
    bubble: float  # the step minus the work of the busiest rank
    busy: tuple[float, ...]
    idle: tuple[float, ...]  # share of the step without work
    peak_for_b: tuple[int, ...]  # most activations stored for B's
    peak_for_w: tuple[int, ...]  # most activations stored for W's
    peak: tuple[int, ...]  # most of both at once


class Wait(NamedTuple):
    """A message that an idle rank waited for: sent by whom when, and who continued when."""

    sender: int
    sent: float
    taker: int
    begun: float


def rows(timeline: Timeline, schedule: Schedule) -> list[list[Span]]:
    """Return each rank's boxes. Unless the schedule is split, a B and its W are one, of kind "BW".

    (A measured timeline has them as one already.)
    """
    out: list[list[Span]] = []
    for spans in timeline.ranks:
        out.append([])
        for span in spans:
            if span.action.kind == "W" and not schedule.split:
                both = span.action._replace(kind="BW")
                out[-1][-1] = Span(both, out[-1][-1].begin, span.end)
            else:
                out[-1].append(span)
    return out


def in_flight(boxes: Sequence[Span]) -> list[InFlight]:
    """Return how many activations a rank holds, at every time when that changes.

    An activation is held for its B from the begin of its F to the end of its B, and then for its W
    to the end of its W. Without a backward none is held.
    """
    trains = any(box.action.kind != "F" for box in boxes)
    out = [InFlight(boxes[0].begin if boxes else 0.0, 0, 0)]
    for (kind, _, _), begin, end in boxes if trains else ():
        _, b, w = out[-1]
        more_b, more_w = {"F": (1, 0), "B": (-1, 1), "W": (0, -1), "BW": (-1, 0)}[kind]
        out.append(InFlight(begin if kind == "F" else end, b + more_b, w + more_w))
    return out


def summary(ranks: Sequence[Sequence[Span]]) -> Summary:
    """Return the Summary of all ranks' boxes (see rows)."""
    boxes = [box for rank in ranks for box in rank]
    step = max(box.end for box in boxes) - min(box.begin for box in boxes)
    busy = tuple(sum(box.end - box.begin for box in rank) for rank in ranks)
    activations_over_time = [in_flight(rank) for rank in ranks]
    return Summary(
        step=step,
        bubble=step - max(busy),
        busy=busy,
        idle=tuple(1 - work / step for work in busy),
        peak_for_b=tuple(max(point.for_b for point in curve) for curve in activations_over_time),
        peak_for_w=tuple(max(point.for_w for point in curve) for curve in activations_over_time),
        peak=tuple(
            max(point.for_b + point.for_w for point in curve) for curve in activations_over_time
        ),
    )


def usual_peak(schedule: Schedule) -> int:
    """Return what 1F1B's first rank holds at most, counted in activations of these stages."""
    return min(len(schedule.ranks), schedule.micro_batches) * schedule.chunks


def waits(ranks: Sequence[Sequence[Span]], schedule: Schedule) -> list[Wait]:
    """Return the messages for which idle ranks waited. ranks: boxes (see rows).

    A pause shorter than 15% of a typical action does not count.
    """
    sent = {  # the gradient of a BW leaves after its W
        (rank, box.action._replace(kind=box.action.kind[-1])): box.end
        for rank, boxes in enumerate(ranks)
        for box in boxes
    }
    begin = min(boxes[0].begin for boxes in ranks if boxes)
    lengths = sorted(box.end - box.begin for boxes in ranks for box in boxes)
    least = 0.15 * lengths[len(lengths) // 2]
    out = []
    for rank, boxes in enumerate(ranks):
        sources = dict(zip(schedule.ranks[rank], schedule.sources[rank], strict=True))
        free = begin
        for box in boxes:
            source = sources[box.action._replace(kind=box.action.kind[0])]
            if source and source[0] != rank and box.begin - free > least:
                out.append(Wait(source[0], sent[source], rank, box.begin))
            free = box.end
    return out
