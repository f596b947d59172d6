# SPDX-License-Identifier: Apache-2.0
"""A pipeline's step from one rank's record: the bubble, other ranks' stages, when inputs arrive."""

import pytest

from forecast.rehearsal.clock import time_record
from forecast.rehearsal.events import Action, Event, Transfer, Where
from forecast.rehearsal.pipeline_clock import action_of, own_seconds, stage_seconds, time_pipeline
from mpu.pipeline import schedules
from mpu.pipeline.simulate import Costs, simulate
from tests.forecast.rehearsal.clock_device import HERE, device, kernel


def record(
    schedule: schedules.Schedule, rank: int, seconds: dict[str, int], embedding: int = 0
) -> list[Event]:
    """Return what a rank's engine would ask for; BW where B and W are one, as in the engine.

    seconds: of an action in layers. embedding: what each takes besides.
    """
    events: list[Event] = []
    for kind, chunk, i in schedule.ranks[rank]:
        fused = kind != "F" and not schedule.split
        if fused and kind == "W":
            continue
        name = "BW" if fused else kind
        stage = schedule.stage(rank, chunk)
        words = f"{name} chunk {chunk} micro-batch {i} in stage {stage} of iteration 1"
        layers = kernel(sum(seconds[part] for part in name))
        layers = layers._replace(where=Where(layer="layers.0.mlp.down"))
        events += [Action(words), layers, *[kernel(embedding)] * bool(embedding)]
    return [*events, Action("the update of iteration 1"), kernel(5)]


@pytest.mark.parametrize("name, p, m", [("1f1b", 4, 8), ("zb-h1", 4, 8), ("zb-v", 2, 6)])
@pytest.mark.parametrize("rank", (0, 1))
def test_a_pipeline_of_equal_stages_takes_what_its_simulation_says(
    name: str, p: int, m: int, rank: int
) -> None:
    schedule = schedules.build(name, p, m, schedules.CHUNKS[name])
    stages = schedule.stages
    work = Costs([1.0] * stages, [2.0] * stages, [1.0] * stages)
    timing = time_pipeline(
        record(schedule, rank, {"F": 1, "B": 2, "W": 1}), device(), schedule, rank, work, work
    )
    expected = simulate(schedule, work)
    assert timing.step_seconds == pytest.approx(expected.step + 5)
    assert timing.exposed_seconds["bubble"] == pytest.approx(expected.bubble)
    assert timing.exposed_seconds["pp"] == 0
    assert max(span.end for span in timing.spans) == pytest.approx(timing.step_seconds)
    begins = [s.begin for s in timing.actions if action_of(s.words)]
    own = [s for s in expected.timeline.ranks[rank] if schedule.split or s.action.kind != "W"]
    assert begins == pytest.approx([span.begin for span in own])


def test_other_stages_take_this_rank_s_seconds_in_proportion_to_their_work() -> None:
    schedule = schedules.build("1f1b", 2, 3)
    work = Costs([10.0, 30.0], [20.0, 60.0], [10.0, 30.0])
    alone = time_record(record(schedule, 0, {"F": 2, "B": 4, "W": 2}), device())
    costs = stage_seconds(own_seconds(alone.actions, schedule, 0, work), work, work)
    assert costs.forward == [2, 6]
    assert costs.input_gradient == [4, 12] and costs.weight_gradient == [2, 6]


def test_other_stages_do_not_look_up_the_embedding() -> None:
    schedule = schedules.build("zb-h1", 2, 3)
    work = Costs([10.0, 20.0], [10.0, 20.0], [10.0, 20.0])
    events = record(schedule, 0, {"F": 2, "B": 4, "W": 3}, embedding=1)
    own = own_seconds(time_record(events, device()).actions, schedule, 0, work)
    costs = stage_seconds(own, work, work)
    assert costs.forward == [2 + 1, 2 * 2]
    assert (costs.input_gradient, costs.weight_gradient) == ([4 + 1, 2 * 4], [3 + 1, 2 * 3])


def test_a_stage_without_layers_has_what_was_measured_of_it() -> None:
    schedule = schedules.build("1f1b", 2, 3)
    work = Costs([0.0, 30.0], [0.0, 60.0], [0.0, 30.0])
    alone = time_record(record(schedule, 0, {"F": 2, "B": 4, "W": 2}), device())
    costs = stage_seconds(own_seconds(alone.actions, schedule, 0, work), work, work)
    assert (costs.forward[0], costs.input_gradient[0], costs.weight_gradient[0]) == (2, 3, 3)


def test_messages_delay_the_pipeline_and_count_for_pp() -> None:
    schedule = schedules.build("1f1b", 2, 2)
    work = Costs([1.0] * 2, [1.0] * 2, [1.0] * 2)
    events = record(schedule, 0, {"F": 1, "B": 1, "W": 1})
    sent = Transfer(1, "send", "pp", (0, 1), 1, 0, 10, 10, "bfloat16", (), 2, 0, (), (), -1, "",
                    HERE)  # fmt: skip
    timing = time_pipeline([*events[:2], sent, *events[2:]], device(), schedule, 0, work, work)
    plain = time_pipeline(events, device(), schedule, 0, work, work)
    assert timing.exposed_seconds["pp"] == timing.step_seconds - plain.step_seconds > 0


def test_a_record_that_lacks_an_action_is_refused() -> None:
    schedule = schedules.build("1f1b", 2, 2)
    work = Costs([1.0] * 2, [1.0] * 2, [1.0] * 2)
    with pytest.raises(ValueError, match="pipeline rank 1 has no F of 1"):
        own_seconds([], schedule, 1, work)


def test_words_of_the_engine_are_read() -> None:
    assert action_of("BW chunk 1 micro-batch 12 in stage 5 of iteration 3") == ("BW", 1, 12, 5)
    assert action_of("waiting for F chunk 0 micro-batch 1 from stage 0 (rank 4) in stage 1") is None
