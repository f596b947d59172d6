# SPDX-License-Identifier: Apache-2.0
"""Tell the odds that a run crashes: too little memory, an idle rank, or what stalls."""

from collections.abc import Mapping

import numpy as np

from tools.planner.runs import Array, Runs
from tools.planner.step_time import odds

CRASH = {
    "crash_base": "log odds of a run whose predicted memory is a GPU's",
    "crash_memory": "more for each e-fold of predicted memory over a GPU's, from LEAST on",
    "crash_idle": "more where a pipeline rank has nothing to do",
    "crash_stall": "more where a run stalls for certain",
}
LEAST = -1.5  # log of the share of a GPU's memory below which less makes no difference


def crash_features(c: Mapping[str, float], r: Runs, gib: Array, limit: Array) -> Array:
    """Return [runs, features] in the order of CRASH. gib: predicted memory; limit: a GPU's."""
    over = np.maximum(np.log(gib / limit), LEAST)
    columns = (np.ones(len(r)), over, r.idle, odds(c, r))
    return np.stack([np.asarray(column, dtype=float) for column in columns], 1)


def crash_odds(c: Mapping[str, float], r: Runs, gib: Array, limit: Array) -> Array:
    """Return the share of such runs that crash."""
    log_odds = crash_features(c, r, gib, limit) @ np.array([c[name] for name in CRASH])
    return np.asarray(1 / (1 + np.exp(-log_odds)))
