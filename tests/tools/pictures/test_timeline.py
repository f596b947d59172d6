# SPDX-License-Identifier: Apache-2.0
"""The boxes of a timeline, and what ranks hold, are those counted by hand."""

import pytest

from mpu.pipeline.schedules import Action, build
from mpu.pipeline.simulate import Costs, Span, simulate
from tools.pictures.timeline import in_flight, rows, usual_peak


def timeline_of(schedule):
    costs = [1.0] * schedule.stages
    return simulate(schedule, Costs(costs, costs, costs)).timeline


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


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 8)])
def test_the_usual_peak_is_that_of_1f1b(p, m):
    schedule = build("1f1b", p, m)
    peak = simulate(schedule, Costs([1.0] * p, [1.0] * p, [1.0] * p)).peak[0]
    assert usual_peak(schedule) == peak
