# SPDX-License-Identifier: Apache-2.0
"""Compute from a simulated timeline the boxes to draw, and the activations that a rank holds."""

from collections.abc import Sequence
from typing import NamedTuple

from mpu.pipeline.schedules import Schedule
from mpu.pipeline.simulate import Span, Timeline


class InFlight(NamedTuple):
    """The activations held for B's and W's from `time` on, one for each stage and micro-batch."""

    time: float
    for_b: int
    for_w: int


def rows(timeline: Timeline, schedule: Schedule) -> list[list[Span]]:
    """Return each rank's boxes. Unless the schedule is split, a B and its W are one, of kind "BW".
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
    """Return the numbers of activations that a rank holds, each time they change.

    An activation is held for its B from the start of its F to the end of its B, and then for its W
    to the end of its W. Without a backward none is held.
    """
    trains = any(box.action.kind != "F" for box in boxes)
    out = [InFlight(boxes[0].begin if boxes else 0.0, 0, 0)]
    for (kind, _, _), begin, end in boxes if trains else ():
        _, b, w = out[-1]
        more_b, more_w = {"F": (1, 0), "B": (-1, 1), "W": (0, -1), "BW": (-1, 0)}[kind]
        out.append(InFlight(begin if kind == "F" else end, b + more_b, w + more_w))
    return out


def usual_peak(schedule: Schedule) -> int:
    """Return the peak of 1F1B's first rank, counted in activations of these stages."""
    return min(len(schedule.ranks), schedule.micro_batches) * schedule.chunks
