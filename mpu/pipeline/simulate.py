# SPDX-License-Identifier: Apache-2.0
"""Prove a schedule and time it before anything runs: validate, simulate."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import NamedTuple

from mpu.pipeline.play import Event, Speed, play
from mpu.pipeline.schedules import Action, Schedule
from mpu.pipeline.steps import Message, Step, blocking_steps, last_needed, plan


class ScheduleError(ValueError):
    """A schedule that cannot be run: the text names the rank, the action and what is broken."""


@dataclass(frozen=True)
class Costs:
    """Seconds, or any unit, of F, B and W of each stage, in stage order, and of one message."""

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
    """What each rank did when: simulated, or measured in a run."""

    ranks: tuple[tuple[Span, ...], ...]


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError unless the schedule can be run and gives the weights every other gives.

    Each rank has every action once (or only its F's: see forward_only); F before B before W; B's
    and W's of a chunk in micro-batch order, so that gradients add up in one order; B directly
    before its W unless split; no rank waits for ever for an input; and `rehearse` passes.
    """
    kinds = "FBW" if any(a.kind != "F" for rank in schedule.ranks for a in rank) else "F"
    expected = list(product(kinds, range(schedule.chunks), range(schedule.micro_batches)))
    for rank, actions in enumerate(schedule.ranks):
        at = {action: n for n, action in enumerate(actions)}
        for required in expected:
            if required not in at:
                raise ScheduleError(f"rank {rank} lacks {Action(*required)}")
        if len(actions) > len(expected):
            extra = (
                Counter(actions) - Counter(Action(*required) for required in expected)
            ).popitem()
            raise ScheduleError(f"rank {rank} does {extra[0]} once more than it should")
        for action in actions:
            kind, chunk, i = action
            before = {"B": "F", "W": "B"}.get(kind)
            if before and at[Action(before, chunk, i)] > at[action]:
                raise ScheduleError(f"rank {rank} does {action} before its {before}")
            if kind != "F" and i and at[Action(kind, chunk, i - 1)] > at[action]:
                raise ScheduleError(f"rank {rank} does {action} before micro-batch {i - 1}")
            if kind == "W" and not schedule.split and at[Action("B", chunk, i)] != at[action] - 1:
                raise ScheduleError(f"rank {rank} runs {action} apart from its B, but is not split")
    try:
        steps = blocking_steps(schedule)
    except ValueError as standstill:
        raise ScheduleError(str(standstill)) from None
    rehearse(schedule, steps)
    rehearse(schedule, plan(schedule), blocking=False)


def rehearse(schedule: Schedule, steps: Sequence[Sequence[Step]], blocking: bool = True) -> None:
    """Raise ScheduleError unless the messages of a plan can be run.

    Each action's input must be received before it, and on every directed pair of ranks the n-th
    receive must take what the n-th send gives. No receive may be posted before an action that its
    sender needs. blocking: also execute all sends and receives, both sides of a message at once: no
    rank may wait for ever.
    """
    gives: dict[tuple[int, int], list[Message]] = defaultdict(list)
    takes: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, mine in enumerate(steps):
        received: set[Message] = set()
        for step, source in zip(mine, schedule.sources[rank], strict=True):
            received.update(step.receives)
            if source and source[0] != rank:
                needs = Message(*step.action, source[0], rank)
                if needs not in received:
                    raise ScheduleError(f"rank {rank} does {step.action} before it receives it")
            for message in step.receives:
                takes[message.sender, rank].append(message)
            if step.sends:
                gives[rank, step.sends.to].append(step.sends)
    for sender, to in sorted(gives.keys() | takes.keys()):
        for given, taken in zip_longest(gives[sender, to], takes[sender, to]):
            if given != taken:
                raise ScheduleError(
                    f"rank {sender} sends {given or 'no more'} where rank {to} receives "
                    f"{taken or 'no more'}"
                )
    needed = last_needed(schedule)
    for rank, mine in enumerate(steps):
        for n, step in enumerate(mine):
            for message in step.receives:
                if needed[message] >= n:
                    raise ScheduleError(
                        f"rank {rank} posts the receive of {message} before "
                        f"{mine[needed[message]].action}, which the sender needs"
                    )
    if blocking:
        _rendezvous(steps)


def _rendezvous(steps: Sequence[Sequence[Step]]) -> None:
    """Execute each rank's sends and receives in order, both sides of a message at once."""
    to_do = [deque(m for step in mine for m in (*step.receives, step.sends) if m) for mine in steps]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(to_do):
            while own:
                peer = to_do[own[0].to if own[0].sender == rank else own[0].sender]
                if not peer or peer[0] != own[0]:
                    break
                peer.popleft()
                own.popleft()
                moved = True
    for rank, own in enumerate(to_do):
        if own:
            verb = "send" if own[0].sender == rank else "receive"
            raise ScheduleError(f"rank {rank} waits forever to {verb} {own[0]}")


@dataclass(frozen=True)
class Simulation:
    """A schedule's cost: times in the unit of the costs; a tuple has an entry for each rank."""

    timeline: Timeline
    step: float  # from the first begin to the last end
    bubble: float  # step minus the work of the busiest rank
    busy: tuple[float, ...]  # work of each rank
    idle: tuple[float, ...]  # waits between a rank's first begin and last end
    peak_for_b: tuple[float, ...]  # most activations stored for B's
    peak_for_w: tuple[float, ...]  # most activations stored for W's
    peak: tuple[float, ...]  # most of both at once


def simulate(
    schedule: Schedule, costs: Costs, speed: Speed | None = None
) -> Simulation:
    """Time a schedule: each rank does its list in order and waits for inputs; sends do not block.
    An overlapped F takes as long as it does alone, then its B: what the two hide is not known here.

    Peaks count activations, one for each micro-batch of a stage. An F holds nothing if the schedule
    has no backward. speed: of ranks that slow each other down (play.py).
    """
    ones = [1.0] * schedule.stages
    timeline = Timeline(_time(schedule, costs, speed))
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


def _time(schedule: Schedule, costs: Costs, speed: Speed | None) -> tuple[tuple[Span, ...], ...]:
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
                # none: it waits for ever
                place = places[sender].get(given, len(places[sender]))
                after.append((sender, place + 2 * (place in schedule.overlapped_forwards(sender))))
                late = costs.send if sender != rank else late
            lane.append(Event(seconds, tuple(after), late))
        lanes.append(lane)
    spans = play(lanes, speed)
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
    """Return the most that each rank holds for its B's, for its W's, and for both at once.

    for_b, for_w: what an F leaves for its B, and a B for its W, of each stage. No time is needed: a
    rank's list is in order.
    """
    return [_peaks(schedule, rank, for_b, for_w) for rank in range(len(schedule.ranks))]


def _peaks(
    schedule: Schedule, rank: int, for_b: Sequence[float], for_w: Sequence[float]
) -> tuple[float, float, float]:
    trains = any(action.kind == "B" for action in schedule.ranks[rank])
    stages = [schedule.stage(rank, chunk) for chunk in range(schedule.chunks)]
    split, last, deferred = schedule.split, schedule.stages - 1, schedule.deferred
    b = w = most_b = most_w = most = 0.0
    overlapped = 0.0  # of an F, whose layers come as those of the B go
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
