# SPDX-License-Identifier: Apache-2.0
"""Record the memory of a layer and of the model's ends, on a pipeline with few layers.

    rank 0              rank 1   rank 2          rank 3
    embedding, a layer  a layer  two layers      a layer, head

Ranks 1 and 2 differ by a layer; ranks 0 and 3 differ from rank 1 by an end of the model. A
recording (forecast/recording.py) has one micro-batch: its forward, its backward and, if the
schedule separates them, its weight gradients.
"""

from functools import lru_cache
from typing import NamedTuple

import pretrain_llama
from forecast.planner.model import read_flags, with_rest
from forecast.recording import LOGITS, MESSAGES, WEIGHT_ROWS, Recording, record
from mpu.pipeline.schedules import Action
from training.settings.config import Config

LAYOUT = "Et|t|tt|tL"
FIRST, MIDDLE, LONGER, LAST = range(4)  # places in the pipeline


class Unit(NamedTuple):
    """What a stage keeps of a micro-batch, in bytes: without what micro-batches share.

    stored: from F to B, without the logits, which are also there. waits: from B to W. working: the
    most that an action has besides, with the messages that a rank has once: the output on its way,
    and the buffer of the next gradient.
    """

    stored: int
    logits: int
    waits: int
    working: int


def unit_config(
    flags: tuple[str, ...], tp: int, more: str, ep: int = 0, dispatcher: str = "auto"
) -> Config:
    """Return the config of the pipeline with few layers, with at least two data-parallel ranks."""
    dp = max(2, ep // tp)
    argv = [*flags, "--num-layers", "5", "--tensor-model-parallel-size", str(tp),
            "--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", LAYOUT,
            *["--sequence-parallel"] * (tp > 1),
            "--micro-batch-size", "1", "--global-batch-size", str(4 * dp)]  # fmt: skip
    argv += more.split()
    if ep:
        argv += ["--expert-model-parallel-size", str(ep), "--expert-tensor-parallel-size", "1"]
        argv += ["--moe-token-dispatcher-type", dispatcher]
    return read_flags(with_rest(argv), 4 * tp * dp)


@lru_cache(maxsize=256)
def units(config: Config) -> tuple[Unit, ...]:
    """Return the memory of each of the four stages."""
    found = record(config, pretrain_llama, few=1, warms_up=False)
    return tuple(_unit(found[rank]) for rank in range(4))


def _unit(recording: Recording) -> Unit:
    always = sum(recording.start.values())
    most, after = dict[str, int](), dict[str, int]()
    logits = once = 0
    for moment in recording.moments():
        if isinstance(moment.action, Action):
            kind = moment.action.kind
            most[kind] = moment.total - always - moment.kinds.get(WEIGHT_ROWS, 0)
            after[kind] = sum(moment.after.values()) - always - moment.after.get(WEIGHT_ROWS, 0)
            if kind == "F":
                logits = moment.after.get(LOGITS, 0)
                once = moment.after.get(MESSAGES, 0) - moment.kinds.get(MESSAGES, 0)
    waits = after["B"] if "W" in most else 0
    kept = after["F"] - once
    working = max(most["F"], most["B"]) - kept
    return Unit(kept - logits, logits, waits, max(working, most.get("W", 0) - waits))
