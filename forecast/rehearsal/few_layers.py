# SPDX-License-Identifier: Apache-2.0
"""Time a step of many equal layers and micro-batches from records of few.

The time of a step is linear in the layers of a stage and in the micro-batches, once there are a few
of each. `numbers` returns the times of one record at one count of micro-batches;
forecast/planner/played.py has them at two counts of each, and extrapolates.
"""

from forecast.device_file import Device
from forecast.rehearsal.clock import Timing, time_record
from forecast.rehearsal.pipeline_clock import action_of, own_seconds, send_seconds
from forecast.rehearsal.run import Rehearsed
from training.run.pipeline_stages import costs
from training.settings.pipeline_schedule import schedule_of

SEPARATOR = "/"
STEP, HOST, REST, SEND = "step", "host", "rest", "send"
BUSY, EXPOSED, BOUND, STAGE, LAYERS = "busy", "exposed", "bound", "stage", "layers"


def numbers(seen: Rehearsed, device: Device, micro_batches: int) -> dict[str, float]:
    """Return the seconds of a rank's step by name; SEPARATOR joins the parts of a name.

    step, host; busy/KIND, exposed/AXIS and bound/NAME: as in Timing. In a pipeline (messages arrive
    at once here) also stage/PART/CHUNK: F, B or W of a chunk, all micro-batches together;
    layers/PART/CHUNK: the part of that in layers; rest: the step without the schedule's actions;
    send: one message.
    """
    step = seen.step(micro_batches)
    if seen.grid.pp.size == 1 and seen.config.parallel.optimizer_state_offload:
        step = [*seen.earlier(micro_batches), *step]  # their copies overlap this step's forward
    timing = time_record(step, device, rank=seen.grid.rank, trace=False)
    found = {STEP: timing.step_seconds, HOST: timing.host_seconds, **_by_name(timing)}
    if seen.grid.pp.size > 1:
        schedule = schedule_of(seen.config, micro_batches)
        rank, work = seen.grid.pp.rank, costs(seen.config, seen.script.model_provider)
        own = own_seconds(timing.actions, schedule, rank, work)
        for kind, by_part in zip((STAGE, LAYERS), own, strict=True):
            for part, of_stage in by_part.items():
                for chunk in range(schedule.chunks):
                    seconds = of_stage[schedule.stage(rank, chunk)] * micro_batches
                    found[SEPARATOR.join((kind, part, str(chunk)))] = seconds
        acted = sum(s.end - s.begin for s in timing.actions if action_of(s.words))
        found[REST] = timing.step_seconds - acted
        found[SEND] = send_seconds(step, device, seen.grid.rank)
    return found


def _by_name(timing: Timing) -> dict[str, float]:
    parts = {BUSY: timing.busy_seconds, EXPOSED: timing.exposed_seconds, BOUND: timing.bounds}
    return {
        SEPARATOR.join((kind, name)): seconds
        for kind, of in parts.items() for name, seconds in of.items()
    }  # fmt: skip
