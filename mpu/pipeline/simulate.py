# SPDX-License-Identifier: Apache-2.0
"""Prove a schedule and time it before anything runs: messages, validate, simulate."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mpu.pipeline.schedules import Action, Schedule, slots


class Message(NamedTuple):
    """What one action hands to another rank: the input of F or B of chunk `chunk` of rank `to`."""

    kind: str  # F: an activation; B: the gradient of one
    chunk: int  # at the receiver
    micro_batch: int
    sender: int  # rank
    to: int  # rank


class Step(NamedTuple):
    """One action of a rank, the receives posted before it, and what is sent after it."""

    action: Action
    receives: tuple[Message, ...]
    sends: Message | None


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit): of F, B and W of each stage, in stage order, and of one message."""

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


@lru_cache(maxsize=64)
def plan(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Return each rank's actions with the receives to post before each and the send after it.

    All come from one linear order of the whole (see _blocking), in which no blocking
    point-to-point can deadlock. Receives then move one action earlier, so that a transfer runs
    under the action before: they never change places on a pair, and never part a B from its W in
    a schedule that is not split.
    """
    hoisted = []
    for rank in _blocking(schedule):
        receives = [step.receives for step in rank]
        for n in range(1, len(rank)):
            before = n - 1
            if not schedule.split and rank[before].action.kind == "W":
                before -= 1
            receives[before] += rank[n].receives
            receives[n] = receives[n][len(rank[n].receives) :]
        hoisted.append(
            tuple(Step(s.action, r, s.sends) for s, r in zip(rank, receives, strict=True))
        )
    return tuple(hoisted)


def _blocking(schedule: Schedule) -> list[list[Step]]:
    """Return each rank's steps in which a receive stands where the message is sent.

    The linear order is that of unit time, rank by rank within a unit: each action is followed by
    its send, and the receiver receives at that very place, before its next action.
    """
    grid = slots(schedule)
    steps: list[list[Step]] = [[] for _ in grid]
    arrived: list[list[Message]] = [[] for _ in grid]
    for t in range(max(map(len, grid), default=0)):
        for rank, row in enumerate(grid):
            action = row[t] if t < len(row) else None
            if action is None:
                continue
            sends = message(schedule, rank, action)
            receives: tuple[Message, ...] = ()
            if schedule.split or action.kind != "W":
                receives = tuple(arrived[rank])
                arrived[rank].clear()
            steps[rank].append(Step(action, receives, sends))
            if sends is not None:
                arrived[sends.to].append(sends)
    return steps


def message(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """Return what an action sends to another rank, or None."""
    kind, chunk, i = action
    stage = schedule.stage(rank, chunk)
    if kind == "F":
        stage += 1
    elif kind == ("B" if schedule.split else "W"):
        stage -= 1
    else:
        return None
    if not 0 <= stage < schedule.stages:
        return None
    to, chunk = schedule.place(stage)
    return None if to == rank else Message("F" if kind == "F" else "B", chunk, i, rank, to)
