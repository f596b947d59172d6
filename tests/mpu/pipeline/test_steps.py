# SPDX-License-Identifier: Apache-2.0
"""No receive is posted before an action of its own rank that its sender needs.

On a GPU a receive is a kernel that waits. If it waits for what a later action of its own rank has
to make, that action must start beside it, and whatever it asks of the device first (a kernel to
load, memory) may wait for the kernel.
"""

from itertools import product

import pytest

from mpu.pipeline.schedules import CHUNKS, NAMES, Action, build, forward_only
from mpu.pipeline.simulate import ScheduleError
from mpu.pipeline.steps import blocking_steps, last_needed, plan
from tests.mpu.pipeline.valid_schedule import rehearse, validate


def needs(schedule):
    """Return {(rank, number of an action): all that must be done before it}, by a search."""
    at = [{action: n for n, action in enumerate(actions)} for actions in schedule.ranks]
    direct = {}
    for rank, actions in enumerate(schedule.ranks):
        for n in range(len(actions)):
            source = schedule.sources[rank][n]
            direct[rank, n] = [(rank, n - 1)] if n else []
            direct[rank, n] += [(source[0], at[source[0]][source[1]])] if source else []
    found = {}
    for start in direct:
        seen, left = set(), [start]
        while left:
            left += [each for each in direct[left.pop()] if not (each in seen or seen.add(each))]
        found[start] = seen
    return found


def too_early(schedule, steps):
    """Return (receives posted before an action that their sender needs, all receives)."""
    closure, bad, count = needs(schedule), 0, 0
    sent = {step.sends: (r, n) for r, own in enumerate(steps) for n, step in enumerate(own)}
    for rank, own in enumerate(steps):
        for n, step in enumerate(own):
            for message in step.receives:
                count += 1
                bad += any(r == rank and other >= n for r, other in closure[sent[message]])
    return bad, count


def always_ahead(schedule):
    """Post each receive an action ahead of its place in the blocking order, whatever is needed."""
    hoisted = []
    for rank in blocking_steps(schedule):
        receives = [()] * len(rank)
        for n, step in enumerate(rank):
            before = max(n - 1, 0)
            before -= not schedule.split and rank[before].action.kind == "W"
            receives[before] += step.receives
        hoisted.append([s._replace(receives=r) for s, r in zip(rank, receives, strict=True)])
    return hoisted


@pytest.mark.parametrize(
    "name, p, m, early, receives",
    [
        ("interleaved", 2, 4, 3, 24),
        ("gpipe", 4, 8, 3, 48),
        ("v-half", 4, 16, 3, 192),
        ("zb-v", 4, 4, 1, 48),
        ("1f1b", 4, 8, 0, 48),
        ("zb-h1", 4, 8, 0, 48),
    ],
)
def test_receives_that_are_posted_too_early_are_counted(name, p, m, early, receives):
    schedule = build(name, p, m, CHUNKS[name])
    steps = always_ahead(schedule)
    assert too_early(schedule, steps) == (early, receives)
    assert too_early(schedule, plan(schedule)) == (0, receives)
    if early:
        with pytest.raises(ScheduleError, match="posts the receive of .*, which the sender needs"):
            rehearse(schedule, steps, blocking=False)


def every(p_most, ms):
    for name, p, m in product(NAMES, range(2, p_most + 1), ms):
        for v in (2, 3, 4) if name == "interleaved" else (CHUNKS[name],):
            try:
                yield build(name, p, m, v)
            except ValueError:  # m is no multiple of interleaved's group
                continue


def check(schedules):
    """Return how many schedules had a receive too early; no plan has one, or differs elsewhere."""
    mended = 0
    for schedule in (each for s in schedules for each in (s, forward_only(s))):
        before, after = always_ahead(schedule), plan(schedule)
        bad, _ = too_early(schedule, before)
        assert too_early(schedule, after)[0] == 0
        validate(schedule)  # the blocking order still ends, and the plan's messages still match
        mended += bad > 0
        moved = sum(
            b.receives != a.receives for i, j in zip(before, after, strict=True)
            for b, a in zip(i, j, strict=True)
        )  # fmt: skip
        assert moved <= 2 * bad, "only what is too early is posted later"
        order = [[step.action for step in rank] for rank in after]
        for rank, steps in enumerate(after):
            for n, step in enumerate(steps):
                for message in step.receives:
                    assert n <= order[rank].index(Action(*message[:3]))
    return mended


def test_no_plan_posts_a_receive_too_early():
    assert check(every(4, (1, 2, 3, 4, 8))) >= 10


def test_what_a_message_needs_of_its_receiver_is_found_by_a_search_too():
    for schedule in every(4, (4, 6)):
        closure, found = needs(schedule), last_needed(schedule)
        at = [{action: n for n, action in enumerate(actions)} for actions in schedule.ranks]
        assert found
        for message, last in found.items():
            mine = Action(*message[:3])
            sender, its = schedule.sources[message.to][at[message.to][mine]]
            assert sender == message.sender
            seen = closure[sender, at[sender][its]]
            assert last == max((n for r, n in seen if r == message.to), default=-1)
            assert last < at[message.to][mine]
