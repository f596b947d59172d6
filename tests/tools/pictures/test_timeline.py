# SPDX-License-Identifier: Apache-2.0
"""The numbers of a timeline equal the simulator's, and those counted by hand."""

import itertools

import pytest

from mpu.pipeline.schedules import CHUNKS, Action, build, forward_only
from mpu.pipeline.simulate import Costs, Span, Timeline, simulate
from tools.pictures.timeline import Wait, in_flight, rows, summary, usual_peak, waits


def timeline_of(schedule, send=0.0, f=1.0, b=1.0, w=1.0):
    n = schedule.stages
    return simulate(schedule, Costs([f] * n, [b] * n, [w] * n, send)).timeline


@pytest.mark.parametrize("name", CHUNKS)
def test_the_numbers_are_the_simulators(name):
    schedule = build(name, 4, 8, CHUNKS[name])
    uneven = [1.0 + 0.1 * stage for stage in range(schedule.stages)]
    costs = Costs(uneven, [1.25 * cost for cost in uneven], [0.75] * len(uneven), 0.2)
    said = simulate(schedule, costs)
    found = summary(rows(said.timeline, schedule))
    assert (found.step, found.bubble) == pytest.approx((said.step, said.bubble))
    assert found.busy == pytest.approx(said.busy)
    assert found.idle == pytest.approx([1 - busy / said.step for busy in said.busy])
    for peak in ("peak", "peak_for_b", "peak_for_w"):
        assert getattr(found, peak) == getattr(said, peak)


def test_b_and_w_are_one_box_unless_the_schedule_is_split():
    fused, split = build("1f1b", 2, 2), build("zb-h1", 2, 2)
    (last,) = rows(timeline_of(fused), fused)[1:]
    assert last == [
        Span(Action("F", 0, 0), 1.0, 2.0),
        Span(Action("BW", 0, 0), 2.0, 4.0),
        Span(Action("F", 0, 1), 4.0, 5.0),
        Span(Action("BW", 0, 1), 5.0, 7.0),
    ]
    timeline = timeline_of(split)
    assert rows(timeline, split) == [list(spans) for spans in timeline.ranks]


def test_an_activation_is_held_from_its_f_to_its_b_and_then_to_its_w():
    kinds = [("F", 0), ("F", 1), ("B", 0), ("W", 0), ("B", 1), ("W", 1)]
    spans = [Span(Action(k, 0, i), 2.0 * n, 2.0 * n + 1) for n, (k, i) in enumerate(kinds)]
    expected = [(0, 0, 0), (0, 1, 0), (2, 2, 0), (5, 1, 1), (7, 1, 0), (9, 0, 1), (11, 0, 0)]
    assert in_flight(spans) == expected


def test_an_evaluation_holds_nothing():
    schedule = forward_only(build("1f1b", 2, 3))
    assert summary(rows(timeline_of(schedule), schedule)).peak == (0, 0)


def test_a_rank_waits_for_the_messages_that_end_its_idleness():
    """Each rank waits for its first input and its last; the others come while it works."""
    schedule = build("1f1b", 2, 3)
    boxes = rows(timeline_of(schedule, send=0.5), schedule)
    assert [box.begin for box in boxes[0]] == [0.0, 1.0, 5.0, 7.0, 8.0, 12.0]
    assert [box.begin for box in boxes[1]] == [1.5, 2.5, 4.5, 5.5, 8.5, 9.5]
    assert waits(boxes, schedule) == [
        Wait(sender=1, sent=4.5, taker=0, begun=5.0),
        Wait(sender=1, sent=11.5, taker=0, begun=12.0),
        Wait(sender=0, sent=1.0, taker=1, begun=1.5),
        Wait(sender=0, sent=8.0, taker=1, begun=8.5),
    ]


def test_a_short_pause_is_no_wait():
    """Two messages take an eighth of an action: such a pause comes with any start of an action."""
    schedule = build("zb-h1", 2, 4)
    boxes = rows(timeline_of(schedule, send=1 / 16), schedule)
    pauses = {b.begin: b.begin - a.end for a, b in itertools.pairwise(boxes[0])}
    assert {pause for pause in pauses.values() if pause} == {0.125, 1.125}
    begun = {wait.begun for wait in waits(boxes, schedule) if wait.taker == 0}
    assert begun == {at for at, pause in pauses.items() if pause == 1.125}


def test_the_turn_of_a_v_is_no_message():
    schedule = build("zb-v", 2, 2, 2)
    found = waits(rows(timeline_of(schedule), schedule), schedule)
    assert found and all(wait.sender != wait.taker for wait in found)


def test_what_ran_is_read_like_what_was_planned():
    """A run tells a fused backward as one span."""
    schedule = build("1f1b", 3, 4)
    planned = rows(timeline_of(schedule), schedule)
    ran = Timeline(tuple(map(tuple, planned)))
    assert rows(ran, schedule) == planned


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 8)])
def test_the_usual_peak_is_that_of_1f1b(p, m):
    schedule = build("1f1b", p, m)
    peak = simulate(schedule, Costs([1.0] * p, [1.0] * p, [1.0] * p)).peak[0]
    assert usual_peak(schedule) == peak
