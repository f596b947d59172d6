# SPDX-License-Identifier: Apache-2.0
"""Tell the odds that a run crashes: too little memory, an idle rank, what stalls, or no reason."""

from collections.abc import Mapping

import numpy as np

from tools.planner.runs import Array, Runs
from tools.planner.step_time import odds

CRASH = {  # each reason may strike alone: a share of the runs that the others spare
    "crash_base": "share of the runs that crash for no reason that is told",
    "crash_memory": "log odds for each e-fold of predicted memory over a GPU's",
    "crash_middle": "log of the share of a GPU's memory, as predicted, at which half of them crash",
    "crash_idle": "share, where a pipeline rank has nothing to do",
    "crash_stall": "share, where a run stalls for certain",
}


def crash_odds(c: Mapping[str, float], r: Runs, gib: Array, limit: Array) -> Array:
    """Return the share of such runs that crash. gib: predicted memory; limit: a GPU's."""
    over = c["crash_memory"] * (np.log(gib / limit) - c["crash_middle"])
    memory = 1 / (1 + np.exp(-np.clip(over, -60, 60)))
    spared = (1 - c["crash_base"]) * (1 - memory) * (1 - c["crash_idle"] * r.idle)
    return np.asarray(1 - spared * (1 - c["crash_stall"] * odds(c, r)))
