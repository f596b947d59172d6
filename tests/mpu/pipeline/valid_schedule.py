# SPDX-License-Identifier: Apache-2.0
"""Check that a schedule can be run: each action once, in order, and no rank waits forever."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import product, zip_longest

from mpu.pipeline.schedules import Action, Schedule
from mpu.pipeline.simulate import ScheduleError
from mpu.pipeline.steps import Message, Step, blocking_steps, last_needed, plan


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError unless the schedule can be run and trains as every other schedule does.

    Each rank has every action once (or only its F's: see forward_only); F before B before W; B's
    and W's of a chunk are in micro-batch order, so that gradients are added in one order; B is
    directly before its W unless split; no rank waits forever for an input; and `rehearse` passes.
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
    """Raise ScheduleError unless the messages of a plan match and can be run.

    Each action's input must be received before it, and on every directed pair of ranks the n-th
    receive must match the n-th send. No receive may be posted before an action that its sender
    needs. blocking: also execute all sends and receives, both sides of a message at once: no rank
    may wait forever.
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
