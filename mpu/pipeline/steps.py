# SPDX-License-Identifier: Apache-2.0
"""Add messages to a schedule: the receives before each action of a rank, and the send after it."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpu.pipeline.schedules import Action, Schedule, slots


class Message(NamedTuple):
    """A tensor that one action sends to another rank: the input of an F or B of rank `to`."""

    kind: str  # F: an activation; B: the gradient of one
    chunk: int  # at the receiver
    micro_batch: int
    sender: int  # rank
    to: int  # rank

    def __str__(self) -> str:
        return f"{Action(*self[:3])} from rank {self.sender} to rank {self.to}"


class Step(NamedTuple):
    """One action of a rank, the receives posted before it, the send after it, and its stage.

    overlapped: it is an F that runs interleaved with the B of the next step, which then posts no
    receives of its own.
    """

    action: Action
    receives: tuple[Message, ...]
    sends: Message | None
    stage: int = 0
    overlapped: bool = False


@lru_cache(maxsize=64)
def plan(schedule: Schedule, first: int = 0) -> tuple[tuple[Step, ...], ...]:
    """Return each rank's actions with the receives to post before each and the send after it.

    first: the first stage in which anything trains. No gradient is sent to a stage before it.

    All derive from one linear order of all actions (see blocking_steps), in which no blocking
    point-to-point can deadlock. Receives, which do not block, are then posted one action earlier
    than in that order, so that a transfer overlaps the preceding action. A receive is not moved if
    its sender depends on that action (see last_needed): posted before the action, it would wait on
    the GPU for a result that the action has yet to produce, and could block the action. Receives
    keep their order on each pair of ranks, and never separate a B from its W in a schedule that is
    not split, nor an F from the B that it overlaps.
    """

    def moves(message: Message) -> bool:
        return message.kind == "F" or schedule.stage(message.to, message.chunk) >= first

    hoisted, blocking = [], blocking_steps(schedule)
    needed = last_needed(schedule)
    for number, rank in enumerate(blocking):
        receives: list[tuple[Message, ...]] = [()] * len(rank)
        for n, step in enumerate(rank):
            if step.receives:
                before = schedule.begin(number, max(n - 1, 0))
                for message in filter(moves, step.receives):
                    receives[before if needed[message] < before else n] += (message,)
        stages = [schedule.stage(number, chunk) for chunk in range(schedule.chunks)]
        hoisted.append(
            tuple(
                step._replace(
                    receives=earlier,
                    sends=step.sends if step.sends and moves(step.sends) else None,
                    stage=stages[step.action.chunk],
                )
                for step, earlier in zip(rank, receives, strict=True)
            )
        )
    return tuple(hoisted)


def last_needed(schedule: Schedule) -> dict[Message, int]:
    """Return, for each message, the last action of its receiver on which its send depends.

    It is the action's index in the receiver's list, or -1 if the send depends on none of them. An
    action depends on the earlier ones of its rank, on the one that computes its input, and on all
    their dependencies. A message cannot depend on the action that uses it, so the index is always
    below that action's; an F and the B that it overlaps count as one action. The schedule must not
    deadlock (blocking_steps raises).
    """
    needs = [list[np.ndarray]() for _ in schedule.ranks]  # [rank][action]: the last of each rank
    at = [{action: n for n, action in enumerate(actions)} for actions in schedule.ranks]
    last, moved = dict[Message, int](), True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            pairs, sources = schedule.overlapped_forwards(rank), schedule.sources[rank]
            while (n := len(needs[rank])) < len(actions):
                count = 3 if n in pairs else 1  # F, B and W
                taken = [
                    (actions[k], source[0], at[source[0]][source[1]])
                    for k in range(n, n + count) if (source := sources[k])
                ]  # fmt: skip
                if any(its >= len(needs[sender]) for _, sender, its in taken):
                    break
                mine = needs[rank][-1].copy() if n else np.full(len(schedule.ranks), -1)
                for action, sender, its in taken:
                    theirs = needs[sender][its]
                    if sender != rank:
                        last[Message(*action, sender, rank)] = int(theirs[rank])
                        np.maximum(mine, theirs, out=mine)
                mine[rank], moved = n + count - 1, True
                needs[rank] += [mine] * count
    return last


def blocking_steps(schedule: Schedule) -> list[list[Step]]:
    """Return each rank's steps, with each receive at the point where its message is sent.

    Actions are ordered by time unit (see slots). Each action is followed by its send, and the
    receiver receives at that point, before its next action. Within a unit a receiver acts before
    its sender if it can, so that nothing is received earlier than necessary. If B and W are one
    backward, the B is directly before its W, and the F that overlaps it before the B.
    """
    messages = {}
    for rank, (actions, sources) in enumerate(zip(schedule.ranks, schedule.sources, strict=True)):
        for action, source in zip(actions, sources, strict=True):
            if source and source[0] != rank:
                messages[source] = Message(*action, source[0], rank)
    steps: list[list[Step]] = [[] for _ in schedule.ranks]
    arrived: list[list[Message]] = [[] for _ in schedule.ranks]
    overlapped: dict[int, Action] = {}  # rank: an F whose B and W come next
    counts = [0] * len(schedule.ranks)
    pairs = [schedule.overlapped_forwards(rank) for rank in range(len(schedule.ranks))]
    for now in zip(*slots(schedule), strict=True):
        acting = {}
        for rank, action in enumerate(now):
            if action and counts[rank] in pairs[rank]:
                overlapped[rank] = action
            elif action and (action.kind != "B" or schedule.split):
                acting[rank] = action
            counts[rank] += action is not None
        while acting:
            chain = []  # a rank, the rank that it sends to, ...
            rank = next(iter(acting))
            while action := acting.pop(rank, None):
                sends = messages.get((rank, action))
                chain.append((rank, action, sends))
                rank = sends.to if sends else rank
            for rank, action, sends in reversed(chain):
                receives, arrived[rank] = tuple(arrived[rank]), []
                if forward := overlapped.pop(rank, None):
                    given = messages.get((rank, forward))
                    steps[rank].append(Step(forward, receives, given, overlapped=True))
                    receives = ()
                    if given:
                        arrived[given.to].append(given)
                if action.kind == "W" and not schedule.split:
                    steps[rank].append(Step(action._replace(kind="B"), receives, None))
                    receives = ()
                steps[rank].append(Step(action, receives, sends))
                if sends:
                    arrived[sends.to].append(sends)
    return steps
