# SPDX-License-Identifier: Apache-2.0
"""Every schedule is valid, every broken one is refused by name, and the costs are the papers'."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpu.pipeline.play import Event, play
from mpu.pipeline.schedules import NAMES, Action, Schedule, build, forward_only
from mpu.pipeline.simulate import Costs, ScheduleError, peak_activations, simulate
from mpu.pipeline.steps import Message, Step, plan
from tests.mpu.pipeline.valid_schedule import rehearse, validate

F, B, W = (lambda i, chunk=0, kind=kind: Action(kind, chunk, i) for kind in "FBW")


def of_any_size(name, p, m, v, group):
    v = 2 if name in ("zb-v", "v-half") else v if name == "interleaved" else 1
    return build(name, p, m, v, group if v > 1 and name == "interleaved" else None)


sizes = {
    "name": st.sampled_from(NAMES),
    "p": st.integers(1, 8),
    "m": st.integers(1, 32),
    "v": st.integers(1, 8),
    "group": st.none() | st.integers(1, 32),
}


@given(**sizes)
@settings(max_examples=60, deadline=None)
def test_every_schedule_is_valid(name, p, m, v, group):
    try:
        schedule = of_any_size(name, p, m, v, group)
    except ValueError:
        assume(False)
    validate(schedule)
    validate(forward_only(schedule))


# ---- what is broken is refused, by rank and action ----


def mutated(schedule, rank, change):
    actions = list(schedule.ranks[rank])
    change(actions)
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return replace(schedule, ranks=tuple(ranks))


def swap(first, second):
    def change(actions):
        a, b = actions.index(first), actions.index(second)
        actions[a], actions[b] = actions[b], actions[a]

    return change


def move_to_end(action):
    return lambda actions: actions.append(actions.pop(actions.index(action)))


@pytest.mark.parametrize(
    "name, rank, change, says",
    [
        ("1f1b", 1, lambda a: a.remove(B(2)), "rank 1 lacks B chunk 0 micro-batch 2"),
        ("gpipe", 0, lambda a: a.append(W(0)), "rank 0 does W chunk 0 micro-batch 0 once more"),
        ("1f1b", 1, lambda a: a.append(F(0, 1)), "rank 1 does F chunk 1 micro-batch 0 once more"),
        ("zb-h1", 0, swap(W(3), B(3)), "rank 0 does W chunk 0 micro-batch 3 before its B"),
        ("v-half", 0, swap(B(1), B(2)), "rank 0 does B chunk 0 micro-batch 2 before micro-batch 1"),
        ("1f1b", 0, move_to_end(W(1)), "rank 0 does W chunk 0 micro-batch 2 before micro-batch 1"),
    ],
)
def test_a_broken_schedule_is_refused(name, rank, change, says):
    schedule = mutated(build(name, 2, 4, 2 if name in ("zb-v", "v-half") else 1), rank, change)
    if says is None:
        return validate(schedule)
    with pytest.raises(ScheduleError, match=says):
        validate(schedule)


def test_a_backward_parted_from_its_weights_is_refused_unless_split():
    ranks = ((F(0), F(1), B(0), B(1), W(0), W(1)),)
    with pytest.raises(ScheduleError, match="W chunk 0 micro-batch 0 apart from its B"):
        validate(Schedule("parted", ranks, 2))
    validate(Schedule("parted", ranks, 2, split=True))


def test_ranks_that_wait_for_one_another_are_refused():
    """Rank 0 wants its B's before it gives the second F, which rank 1 does first."""
    ranks = ((F(0), B(0), W(0), F(1), B(1), W(1)), (F(1), F(0), B(0), W(0), B(1), W(1)))
    with pytest.raises(ScheduleError, match="rank 0 waits forever for the input of B chunk 0 mic"):
        validate(Schedule("circle", ranks, 2))


@given(**sizes, seed=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_dropped_or_doubled_action_is_always_seen(name, p, m, v, group, seed):
    try:
        schedule = of_any_size(name, p, m, v, group)
    except ValueError:
        assume(False)
    rank = seed.randrange(p)
    chosen = seed.choice(schedule.ranks[rank])
    for change in (lambda a: a.remove(chosen), lambda a: a.insert(seed.randrange(len(a)), chosen)):
        with pytest.raises(ScheduleError, match=f"rank {rank} .*{chosen}"):
            validate(mutated(schedule, rank, change))


# ---- the plan of messages ----


def in_blocking_order(schedule):
    """Move each receive back to directly before the action that needs it."""
    steps = [[step._replace(receives=()) for step in rank] for rank in plan(schedule)]
    for rank in plan(schedule):
        for message in (m for step in rank for m in step.receives):
            mine = steps[message.to]
            n = [step.action for step in mine].index(Action(*message[:3]))
            mine[n] = mine[n]._replace(receives=(message,))
    return steps


def test_the_plan_of_two_ranks_receives_one_action_ahead():
    first = Message("F", 0, 0, 0, 1), Message("F", 0, 1, 0, 1)
    back = Message("B", 0, 0, 1, 0), Message("B", 0, 1, 1, 0)
    assert plan(build("1f1b", 2, 2)) == (
        (
            Step(F(0), (), first[0]),
            Step(F(1), (back[0],), first[1]),
            Step(B(0), (back[1],), None),
            Step(W(0), (), None),
            Step(B(1), (), None),
            Step(W(1), (), None),
        ),
        (
            Step(F(0), first, None, 1),
            Step(B(0), (), None, 1),
            Step(W(0), (), back[0], 1),
            Step(F(1), (), None, 1),
            Step(B(1), (), None, 1),
            Step(W(1), (), back[1], 1),
        ),
    )


def test_the_turn_of_a_v_and_one_rank_send_nothing():
    messages = [m for rank in plan(build("zb-v", 3, 4, 2)) for s in rank for m in s.receives]
    assert len(messages) == 4 * 2 * 4  # F's and B's of 4 micro-batches over 2 hops down and 2 up
    assert {abs(m.sender - m.to) for m in messages} == {1}
    for name, v in (("1f1b", 1), ("interleaved", 3), ("v-half", 2)):
        steps = plan(build(name, 1, 3, v))[0]
        assert all(step.receives == () and step.sends is None for step in steps)


def test_crossed_sends_are_refused():
    schedule = build("gpipe", 2, 3)
    steps = [list(rank) for rank in plan(schedule)]
    first, second = steps[0][0], steps[0][1]
    steps[0][:2] = first._replace(sends=second.sends), second._replace(sends=first.sends)
    with pytest.raises(
        ScheduleError,
        match="rank 0 sends F chunk 0 micro-batch 1 from rank 0 to rank 1 where rank 1 receives "
        "F chunk 0 micro-batch 0 from rank 0",
    ):
        rehearse(schedule, steps)


def test_a_missing_send_and_a_late_receive_are_refused():
    schedule = build("1f1b", 2, 3)
    steps = [list(rank) for rank in plan(schedule)]
    steps[0][2] = steps[0][2]._replace(sends=None)
    assert steps[0][2].action == B(0)  # which sends nothing anyway
    steps[0][1] = steps[0][1]._replace(sends=None)
    with pytest.raises(ScheduleError, match="rank 0 sends F chunk 0 micro-batch 2.*receives F chu"):
        rehearse(schedule, steps)
    steps = [list(rank) for rank in plan(schedule)]
    steps[1][0], steps[1][1] = (
        steps[1][0]._replace(receives=()),
        steps[1][1]._replace(receives=steps[1][0].receives + steps[1][1].receives),
    )
    with pytest.raises(ScheduleError, match="rank 1 does F chunk 0 micro-batch 0 before it rec"):
        rehearse(schedule, steps)


def test_a_blocking_deadlock_is_found_by_executing():
    """Receives moved to their actions: in the steady state of 1F1B both ranks send first."""
    schedule = build("1f1b", 2, 4)
    steps = in_blocking_order(schedule)
    rehearse(schedule, steps, blocking=False)
    with pytest.raises(ScheduleError, match="rank 0 waits forever to send F chunk 0 micro-batch"):
        rehearse(schedule, steps)


# ---- time and memory ----


def even(schedule, f=1.0, b=1.0, w=1.0, send=0.0):
    """Simulate with F, B and W of a whole rank, shared by its chunks."""
    each = [[cost / schedule.chunks] * schedule.stages for cost in (f, b, w)]
    return simulate(schedule, Costs(*each, send))


COSTS = [(1, 1, 1), (0.6, 1.3, 0.7)]


@pytest.mark.parametrize("f, b, w", COSTS)
@pytest.mark.parametrize("p, m", [(1, 4), (2, 1), (4, 2), (4, 9)])
def test_1f1b_and_gpipe_cost_what_the_formulas_say(p, m, f, b, w):
    for name, peak in (
        ("1f1b", tuple(min(m, p - r) for r in range(p))),
        ("gpipe", (m,) * p),
    ):
        cost = even(build(name, p, m), f, b, w)
        assert cost.bubble == pytest.approx((p - 1) * (f + b + w), abs=1e-9)
        assert cost.step == pytest.approx((m + p - 1) * (f + b + w), abs=1e-9)
        assert cost.busy == pytest.approx((m * (f + b + w),) * p, abs=1e-9)
        assert cost.peak == cost.peak_for_b == peak
        assert cost.peak_for_w == (0,) * p


@pytest.mark.parametrize("f, b, w", COSTS)
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p, m", [(1, 3), (2, 4), (4, 16)])
def test_interleaving_divides_the_bubble_by_v(p, m, v, f, b, w):
    cost = even(build("interleaved", p, m, v), f, b, w)
    assert cost.bubble == pytest.approx((p - 1) * (f + b + w) / v, abs=1e-9)
    assert cost.peak[0] / (p * v) == pytest.approx(1 + (p - 1) / (p * v), abs=1e-9)
    assert max(cost.peak) == cost.peak[0]


@pytest.mark.parametrize("p", [1, 4, 7])
def test_zb_h1_leaves_a_third_of_the_bubble_in_1f1bs_memory(p):
    for m in range(1, 4 * p + 1):
        cost = even(build("zb-h1", p, m), 2, 2, 2)
        assert max(cost.peak) == min(p, m)
        assert cost.peak_for_b == tuple(min(m, p - r) for r in range(p))
        if m >= p:
            assert cost.bubble == pytest.approx((p - 1) * (2 + 2 - 2), abs=1e-9)
        else:
            assert cost.bubble < (p - 1) * 6


@pytest.mark.parametrize("p", [1, 4, 7])
def test_zb_v_has_no_bubble_but_the_start_up_in_1f1bs_memory(p):
    for m in range(1, 4 * p + 1):
        cost = even(build("zb-v", p, m, 2), 2, 2, 2)  # one unit a chunk
        assert max(cost.peak) == min(2 * p, 2 * m)
        if m >= p:
            assert cost.bubble == pytest.approx(p - 1, abs=1e-9)
        if m >= 2 * p - 1:
            assert cost.idle == pytest.approx((0,) * p, abs=1e-9)


@pytest.mark.parametrize("p", [1, 4, 7])
def test_v_half_has_half_the_bubble_in_half_the_memory(p):
    for m in range(1, 4 * p + 1):
        cost = even(build("v-half", p, m, 2), 2, 2, 2)
        assert max(cost.peak) <= min(2 * ((p + 2) // 2), 2 * m)
        if m >= p:
            assert cost.bubble <= even(build("1f1b", p, m), 2, 2, 2).bubble / 2 + 1e-9


def test_uneven_stages_and_slow_links_by_hand():
    """Rank 1 is slow, a message takes 1/2: F0 0-1, F1 1-2; F0 1.5-4.5, B0 W0 4.5-7.5 ..."""
    schedule = build("1f1b", 2, 2)
    cost = simulate(schedule, Costs([1, 3], [1, 2], [1, 1], send=0.5))
    spans = [[(s.begin, s.end) for s in rank] for rank in cost.timeline.ranks]
    assert spans[0] == [(0, 1), (1, 2), (8, 9), (9, 10), (14, 15), (15, 16)]
    assert spans[1] == [(1.5, 4.5), (4.5, 6.5), (6.5, 7.5), (7.5, 10.5), (10.5, 12.5), (12.5, 13.5)]
    assert (cost.step, cost.bubble) == (16, 4)
    assert (cost.busy, cost.idle) == ((6, 12), (10, 0))
    split = simulate(replace(schedule, split=True), Costs([1, 3], [1, 2], [1, 1], send=0.5))
    assert split.timeline.ranks[0][2].begin == 7  # the gradient leaves before rank 1's W


def test_the_turn_of_a_v_pays_no_message():
    cost = simulate(build("zb-v", 2, 1, 2), Costs([1] * 4, [1] * 4, [1] * 4, send=10))
    assert cost.timeline.ranks[1][0].end == cost.timeline.ranks[1][1].begin == 12


def test_peaks_count_bytes_of_each_stage():
    schedule = build("zb-h1", 2, 3)
    assert "".join(a.kind for a in schedule.ranks[1]) == "FBFBWFBWW"
    assert peak_activations(schedule, [100, 10], [30, 3]) == [(200, 30, 200), (10, 6, 13)]


def test_forwards_alone_hold_nothing_and_take_no_longer_than_they_must():
    cost = even(forward_only(build("1f1b", 4, 8)))
    assert (cost.step, cost.peak) == (4 + 8 - 1, (0, 0, 0, 0))


def test_a_schedule_that_sticks_is_not_timed():
    ranks = ((F(0), B(0), W(0), F(1), B(1), W(1)), (F(1), F(0), B(0), W(0), B(1), W(1)))
    with pytest.raises(ScheduleError, match="rank 0 waits forever for the input of B chunk 0"):
        simulate(Schedule("circle", ranks, 2), Costs([1, 1], [1, 1], [1, 1]))


def test_events_of_lanes_wait_for_each_other():
    lanes = [[Event(2.0), Event(1.0, ((1, 0),), 0.5)], [Event(3.0), Event(1.0)], [Event(4.0)]]
    assert play(lanes) == [[(0, 2), (3.5, 4.5)], [(0, 3), (3, 4)], [(0, 4)]]
    assert play([[Event(1.0, ((1, 0),))], [Event(1.0, ((0, 0),))]]) == [[], []]
