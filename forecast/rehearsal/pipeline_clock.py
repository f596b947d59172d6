# SPDX-License-Identifier: Apache-2.0
"""Time a step of a pipeline from one rank's record: when its inputs arrive, and the bubble.

The record of one rank does not show when other ranks send. So there are two passes. First the
record is timed with messages that arrive at once (clock.py), which gives the seconds of each of the
rank's actions. Then mpu/pipeline/simulate.py simulates the whole pipeline with these seconds. The
seconds of another rank's stage are this rank's seconds in layers, scaled by work; its seconds
outside layers are left out, as other stages do not do that work (the embedding, for example).
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from forecast.device_file import Device
from forecast.rehearsal.clock import ActionSpan, Span, Timing, time_record
from forecast.rehearsal.events import Event, Transfer
from forecast.rehearsal.links import message_seconds
from mpu.pipeline.schedules import Schedule
from mpu.pipeline.simulate import Costs, Simulation, simulate

WORDS = re.compile(r"(F|B|W|BW) chunk (\d+) micro-batch (\d+) in stage (\d+)")
Key = tuple[str, int, int]  # F, B or W, chunk, micro-batch


def action_of(words: str) -> tuple[str, int, int, int] | None:
    """Return (kind, chunk, micro-batch, stage) of a pipeline action, or None for other words."""
    found = WORDS.match(words)
    return (found[1], int(found[2]), int(found[3]), int(found[4])) if found else None


def parts_of(words: str) -> list[tuple[str, int]]:
    """Return (kind, stage) of each action named in the words: two if they overlap, [] if none."""
    return [(m[1], int(m[4])) for m in WORDS.finditer(words)] if WORDS.match(words) else []


class Own(NamedTuple):
    """Seconds of a rank's own stages: {"F", "B", "W": {stage: mean over micro-batches}}."""

    whole: dict[str, dict[int, float]]
    in_layers: dict[str, dict[int, float]]


def own_seconds(
    actions: Sequence[ActionSpan], schedule: Schedule, pp_rank: int, work: Costs
) -> Own:
    """Return the seconds of this rank's stages, whole and in layers.

    actions: the timed actions of this rank. work: of every stage, in any unit, such as FLOPs.
    Raises ValueError if the record has no F, B or W of a stage.
    """
    parts = _by_part(work)
    measured: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for span in actions:
        each = [(part, stage) for kind, stage in parts_of(span.words) for part in kind]
        total = sum(parts[part][stage] for part, stage in each)
        for part, stage in each:  # split in proportion to work; equally if there is no work
            share = parts[part][stage] / total if total else 1 / len(each)
            seconds = (span.end - span.begin) * share, span.in_layers * share
            measured[part, stage].append(seconds)
    own = [schedule.stage(pp_rank, chunk) for chunk in range(schedule.chunks)]
    for part in parts:
        lacking = [stage for stage in own if not measured[part, stage]]
        if lacking:
            raise ValueError(f"the record of pipeline rank {pp_rank} has no {part} of {lacking[0]}")
    means = {
        part: {s: [sum(each) / len(each) for each in zip(*measured[part, s], strict=True)]
               for s in own}
        for part in parts
    }  # fmt: skip
    whole, in_layers = (
        {part: {s: mean[n] for s, mean in of_stage.items()} for part, of_stage in means.items()}
        for n in (0, 1)
    )
    return Own(whole, in_layers)


def stage_seconds(own: Own, work: Costs, of_layers: Costs) -> Costs:
    """Return the seconds of F, B and W of every stage.

    own: the seconds of one rank's stages. Other stages take this rank's seconds in layers per unit
    of work, for each part and over all its chunks. work: of every stage; of_layers: only that of
    its layers.
    """
    seconds: dict[str, list[float]] = {}
    amounts_in_layers = _by_part(of_layers)
    for part, amounts in _by_part(work).items():
        mean, done = own.whole[part], amounts_in_layers[part]
        unit = sum(own.in_layers[part].values()) / (sum(done[s] for s in mean) or 1.0)
        seconds[part] = [mean.get(s, unit * amount) for s, amount in enumerate(amounts)]
    return Costs(seconds["F"], seconds["B"], seconds["W"])


def _by_part(work: Costs) -> dict[str, Sequence[float]]:
    return {"F": work.forward, "B": work.input_gradient, "W": work.weight_gradient}


def send_seconds(events: Sequence[Event], device: Device, rank: int) -> float:
    """Return the seconds of the longest message that a world rank sends."""
    sends = [e for e in events if isinstance(e, Transfer) and e.verb == "send"]
    return max((message_seconds(device, e.bytes, rank, e.peer) for e in sends), default=0.0)


def through(
    schedule: Schedule, pp_rank: int, costs: Costs, send: float, exposed: Mapping[str, float]
) -> tuple[Simulation, dict[str, float]]:
    """Return the simulation of a schedule, and the exposed seconds with "bubble" and "pp" added.

    exposed: exposed seconds of the rank if messages arrive at once. send: seconds of a message.
    """
    simulated, free = simulate(schedule, replace(costs, send=send)), simulate(schedule, costs)
    found = {**exposed, "bubble": free.step - free.busy[pp_rank]}
    found["pp"] = found.get("pp", 0.0) + simulated.step - free.step
    return simulated, found


def time_pipeline(
    events: Sequence[Event],
    device: Device,
    schedule: Schedule,
    pp_rank: int,
    work: Costs,
    of_layers: Costs,
    flops: float = 0.0,
    dtype: str = "bfloat16",
    rank: int = 0,
    trace: bool = True,
) -> Timing:
    """Time a step of the recorded pipeline rank. Other arguments: see time_record.

    work: of every stage, in any unit; of_layers: only that of its layers.

    exposed_seconds gains "bubble", the time that the rank waits even if messages take no time, and
    "pp", the time that messages add.
    """
    alone = time_record(events, device, flops, dtype, rank, trace)
    costs = stage_seconds(own_seconds(alone.actions, schedule, pp_rank, work), work, of_layers)
    send = send_seconds(events, device, rank)
    simulated, exposed = through(schedule, pp_rank, costs, send, alone.exposed_seconds)
    own = sum(s.end - s.begin for s in alone.actions if action_of(s.words))
    step = alone.step_seconds - own + simulated.step
    begins = {span.action[:3]: span.begin for span in simulated.timeline.ranks[pp_rank]}
    spans, actions = _moved(alone, begins, simulated.step)
    return replace(
        alone,
        step_seconds=step,
        mfu=alone.mfu * alone.step_seconds / step,
        exposed_seconds=exposed,
        spans=spans,
        actions=actions,
    )


def _moved(
    alone: Timing, begins: dict[Key, float], pipeline: float
) -> tuple[list[Span], list[ActionSpan]]:
    """Return the spans and actions, moved to their times in the simulated pipeline.

    begins: of this rank's actions, since the pipeline's begin. Actions before the first of these
    stay; actions after the last one follow the pipeline's end.
    """
    scheduled = [a for a in alone.actions if action_of(a.words)]
    first = scheduled[0].begin
    actions, spans, at, shift = [], list(alone.spans), 0, 0.0
    for number, action in enumerate(alone.actions):
        named = action_of(action.words)
        if named:
            shift = first + begins[named[0][0], named[1], named[2]] - action.begin
        elif action.begin >= scheduled[-1].end:
            shift = first + pipeline - scheduled[-1].end
        later = alone.actions[number + 1 :]
        at, until = action.first_span, later[0].first_span if later else len(spans)
        for n in range(at, until):
            spans[n] = spans[n]._replace(begin=spans[n].begin + shift, end=spans[n].end + shift)
        moved = action._replace(begin=action.begin + shift, end=action.end + shift)
        actions.append(moved)
    return spans, actions
