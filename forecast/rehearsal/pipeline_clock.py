# SPDX-License-Identifier: Apache-2.0
"""Time a step of a pipeline from one rank's record: when its inputs arrive, and the bubble.

A record of one rank cannot tell when another sends. So it is timed twice: once with messages that
arrive at once (clock.py), which gives the seconds of each of the rank's actions; then these
seconds, and those of the other ranks' stages, run through mpu/pipeline/simulate.py, the model of
the whole pipeline. Another stage takes the rank's seconds in layers in proportion to its work: what
a first stage does besides, such as looking up the embedding, no other one does.
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
    """Return (kind, chunk, micro-batch, stage) of a pipeline's action, or None: other words."""
    found = WORDS.match(words)
    return (found[1], int(found[2]), int(found[3]), int(found[4])) if found else None


def parts_of(words: str) -> list[tuple[str, int]]:
    """Return (kind, stage) of what an action's words name: of two where they overlap;
    none for other words.
    """
    return [(m[1], int(m[4])) for m in WORDS.finditer(words)] if WORDS.match(words) else []


class Own(NamedTuple):
    """Seconds of a rank's own stages: {"F", "B", "W": {stage: the mean of its micro-batches}}."""

    whole: dict[str, dict[int, float]]
    in_layers: dict[str, dict[int, float]]


def own_seconds(
    actions: Sequence[ActionSpan], schedule: Schedule, pp_rank: int, work: Costs
) -> Own:
    """Return the seconds of this rank's stages, whole and in layers.

    actions: of this rank, timed. work: of every stage, in any unit, such as FLOPs. Raises
    ValueError where the record lacks one of its actions.
    """
    parts = _by_part(work)
    measured: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for span in actions:
        each = [(part, stage) for kind, stage in parts_of(span.words) for part in kind]
        total = sum(parts[part][stage] for part, stage in each)
        for part, stage in each:  # in proportion to their work; a stage may have no layer
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
    """Return seconds of F, B and W of every stage.

    own: those of one rank's stages, by part. Another stage has this rank's seconds in layers a unit
    of their work, of the same kind and over all its chunks. work: of every stage; of_layers: its
    layers' alone.
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
    """Return a schedule as it is simulated, and what is exposed: "bubble" and "pp" too.

    exposed: of the rank where messages arrive at once. send: seconds of a message.
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
    """Time a step of the pipeline rank whose record this is; see time_record for the rest.

    work: of every stage, in any unit; of_layers: its layers' alone.

    exposed_seconds gets "pp", what messages add, and "bubble", what the rank waits even with
    messages that take no time.
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
    """Return spans and actions at the times that the pipeline's model gives.

    begins: of this rank's actions, since the pipeline's begin. What comes before the first stays,
    what comes after the last follows the pipeline's end.
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
