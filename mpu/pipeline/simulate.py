# SPDX-License-Identifier: Apache-2.0
"""Compute the timeline of a schedule, and its activations, without a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpu.pipeline.play import Event, play
from mpu.pipeline.schedules import Action, Schedule


class ScheduleError(ValueError):
    """A schedule that cannot be run: the message names the rank, the action and the fault."""


@dataclass(frozen=True)
class Costs:
    """Times, in any unit, of F, B and W of each stage, in stage order, and of one message."""

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    send: float = 0.0


class Span(NamedTuple):
    """An action with its begin and end."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank's actions: simulated, or measured in a run."""

    ranks: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True)
class Simulation:
    """The simulated cost of a schedule, in the unit of the costs; tuples have an entry per rank."""

    timeline: Timeline
    step: float  # from the first begin to the last end
    bubble: float  # step minus the work of the busiest rank
    busy: tuple[float, ...]  # work of each rank
    idle: tuple[float, ...]  # waits between a rank's first begin and last end
    peak_for_b: tuple[float, ...]  # most activations stored for B's
    peak_for_w: tuple[float, ...]  # most activations stored for W's
    peak: tuple[float, ...]  # most of both at once


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Time a schedule: each rank runs its list in order and waits for inputs; sends do not block.
    An overlapped F and its B are timed one after the other: the gain of overlap is unknown here.

    Peaks count activations, one for each micro-batch of a stage. An F holds nothing if the schedule
    has no backward. Raises ScheduleError where a rank waits forever.
    """
    ones = [1.0] * schedule.stages
    timeline = Timeline(_time(schedule, costs))
    begins = [min((span.begin for span in spans), default=0.0) for spans in timeline.ranks]
    ends = [max((span.end for span in spans), default=0.0) for spans in timeline.ranks]
    busy = [sum(span.end - span.begin for span in spans) for spans in timeline.ranks]
    peaks = peak_activations(schedule, ones, ones)
    step = max(ends) - min(begins)
    return Simulation(
        timeline=timeline,
        step=step,
        bubble=step - max(busy),
        busy=tuple(busy),
        idle=tuple(e - b - w for b, e, w in zip(begins, ends, busy, strict=True)),
        peak_for_b=tuple(p[0] for p in peaks),
        peak_for_w=tuple(p[1] for p in peaks),
        peak=tuple(p[2] for p in peaks),
    )


def _time(schedule: Schedule, costs: Costs) -> tuple[tuple[Span, ...], ...]:
    """Return when each action begins and ends."""
    cost = {"F": costs.forward, "B": costs.input_gradient, "W": costs.weight_gradient}
    places = [{action: n for n, action in enumerate(actions)} for actions in schedule.ranks]
    lanes: list[list[Event]] = []
    for rank, actions in enumerate(schedule.ranks):
        stages = [schedule.stage(rank, chunk) for chunk in range(schedule.chunks)]
        lane = list[Event]()
        for n, action in enumerate(actions):
            seconds = cost[action.kind][stages[action.chunk]]
            after, late = list[tuple[int, int]](), 0.0
            for sender, given in schedule.inputs(rank, n):
                # none: it waits forever
                place = places[sender].get(given, len(places[sender]))
                after.append((sender, place + 2 * (place in schedule.overlapped_forwards(sender))))
                late = costs.send if sender != rank else late
            lane.append(Event(seconds, tuple(after), late))
        lanes.append(lane)
    spans = play(lanes)
    for rank, actions in enumerate(schedule.ranks):
        if len(spans[rank]) < len(actions):
            action = actions[len(spans[rank])]
            raise ScheduleError(f"rank {rank} waits forever for the input of {action}")
    return tuple(
        tuple(Span(action, *span) for action, span in zip(actions, mine, strict=True))
        for actions, mine in zip(schedule.ranks, spans, strict=True)
    )


def peak_activations(
    schedule: Schedule, for_b: Sequence[float], for_w: Sequence[float]
) -> list[tuple[float, float, float]]:
    """Return the peak that each rank holds for its B's, for its W's, and for both at once.

    for_b, for_w: the memory that an F keeps for its B, and a B for its W, of each stage. Times are
    not needed: a rank runs its list in order.
    """
    return [_peaks(schedule, rank, for_b, for_w) for rank in range(len(schedule.ranks))]


def _peaks(
    schedule: Schedule, rank: int, for_b: Sequence[float], for_w: Sequence[float]
) -> tuple[float, float, float]:
    trains = any(action.kind == "B" for action in schedule.ranks[rank])
    stages = [schedule.stage(rank, chunk) for chunk in range(schedule.chunks)]
    split, last, deferred = schedule.split, schedule.stages - 1, schedule.deferred
    b = w = most_b = most_w = most = 0.0
    overlapped = 0.0  # memory of an overlapped F: it grows while that of the B is freed
    pairs = schedule.overlapped_forwards(rank)
    for n, (kind, chunk, _) in enumerate(schedule.ranks[rank] if trains else ()):
        stage = stages[chunk]
        if n in pairs:
            overlapped = for_b[stage]
        elif kind == "F":
            b += for_b[stage]
        elif kind == "B":
            b += overlapped - for_b[stage]
            overlapped = 0.0
            if split or (stage == last and deferred):  # the latter: after the last action
                w += for_w[stage]
        elif split:
            w -= for_w[stage]
        most_b, most_w, most = max(most_b, b), max(most_w, w), max(most, b + w)
    return most_b, most_w, most
