# SPDX-License-Identifier: Apache-2.0
"""Add the messages to a schedule: what a rank receives before each action and sends after it."""

from functools import lru_cache
from typing import NamedTuple

from mpu.pipeline.schedules import Action, Schedule, slots


class Message(NamedTuple):
    """What one action hands to another rank: the input of an F or B of rank `to`."""

    kind: str  # F: an activation; B: the gradient of one
    chunk: int  # at the receiver
    micro_batch: int
    sender: int  # rank
    to: int  # rank

    def __str__(self) -> str:
        return f"{Action(*self[:3])} from rank {self.sender} to rank {self.to}"


class Step(NamedTuple):
    """One action of a rank, the receives posted before it, the send after it, and its stage."""

    action: Action
    receives: tuple[Message, ...]
    sends: Message | None
    stage: int = 0


@lru_cache(maxsize=64)
def plan(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Return each rank's actions with the receives to post before each and the send after it.

    All come from one linear order of the whole (see blocking_steps), in which no blocking
    point-to-point can deadlock. Receives, which do not block, are then posted one action earlier
    than in that order, so that a transfer runs under the action before. They keep their order on
    each pair of ranks, and never part a B from its W in a schedule that is not split.
    """
    hoisted = []
    for number, rank in enumerate(blocking_steps(schedule)):
        receives: list[tuple[Message, ...]] = [()] * len(rank)
        for n, step in enumerate(rank):
            before = max(n - 1, 0)
            if not schedule.split and rank[before].action.kind == "W":
                before -= 1
            receives[before] += step.receives
        steps = zip(rank, receives, strict=True)
        hoisted.append(
            tuple(
                step._replace(receives=earlier, stage=schedule.stage(number, step.action.chunk))
                for step, earlier in steps
            )
        )
    return tuple(hoisted)


def blocking_steps(schedule: Schedule) -> list[list[Step]]:
    """Return each rank's steps, with each receive at the place where its message is sent.

    Actions are ordered by unit time (see slots). Each action is followed by its send, and the
    receiver receives at that very place, before its next action. Within a unit a receiver acts
    before its sender where it can, so that nothing is received earlier than it must. Where B and W
    are one backward, the B stands directly before its W.
    """
    messages = {}
    for rank, (actions, sources) in enumerate(zip(schedule.ranks, schedule.sources, strict=True)):
        for action, source in zip(actions, sources, strict=True):
            if source and source[0] != rank:
                messages[source] = Message(*action, source[0], rank)
    steps: list[list[Step]] = [[] for _ in schedule.ranks]
    arrived: list[list[Message]] = [[] for _ in schedule.ranks]
    for now in zip(*slots(schedule), strict=True):
        acting = {
            rank: action
            for rank, action in enumerate(now)
            if action and (action.kind != "B" or schedule.split)
        }
        while acting:
            chain = []  # a rank, the rank that it sends to, ...
            rank = next(iter(acting))
            while action := acting.pop(rank, None):
                sends = messages.get((rank, action))
                chain.append((rank, action, sends))
                rank = sends.to if sends else rank
            for rank, action, sends in reversed(chain):
                receives, arrived[rank] = tuple(arrived[rank]), []
                if action.kind == "W" and not schedule.split:
                    steps[rank].append(Step(action._replace(kind="B"), receives, None))
                    receives = ()
                steps[rank].append(Step(action, receives, sends))
                if sends:
                    arrived[sends.to].append(sends)
    return steps
