# SPDX-License-Identifier: Apache-2.0
"""Tell the odds that a run crashes: too little memory, a stage without a layer, or what stalls."""

from collections.abc import Mapping

import numpy as np

from tools.planner.run_memory import rank_layers
from tools.planner.runs import Array, Runs
from tools.planner.step_time import odds

CRASH = {
    "crash_base": "log odds of a run whose predicted memory is a GPU's",
    "crash_memory": "more for each e-fold of predicted memory over a GPU's",
    "crash_empty": "more where a pipeline rank has neither a layer nor the output layer",
    "crash_hooks": "more where hooks sum the gradients in a pipeline of over 8 micro-batches",
    "crash_stall": "more where a run stalls for certain",
}


def empty_stage(r: Runs) -> Array:
    """Return 1 where a pipeline rank has neither a layer nor the output layer."""
    layers = rank_layers(r)
    number = np.arange(layers.shape[1])[None, :]
    home = number == (r.head % r.pp)[:, None]
    idle = (layers == 0) & ~home & (number < r.pp[:, None])
    return idle.any(1).astype(float)


def crash_features(c: Mapping[str, float], r: Runs, gib: Array, limit: Array) -> Array:
    """Return [runs, features] in the order of CRASH. gib: predicted memory; limit: a GPU's."""
    hooks = (r.zero == 0) & (r.dp > 1) & (r.pp > 1) & (r.micro_batches > 8) & (r.nodes > 1)
    columns = (np.ones(len(r)), np.log(gib / limit), empty_stage(r), hooks, odds(c, r))
    return np.stack([np.asarray(column, dtype=float) for column in columns], 1)


def crash_odds(c: Mapping[str, float], r: Runs, gib: Array, limit: Array) -> Array:
    """Return the share of such runs that crash."""
    log_odds = crash_features(c, r, gib, limit) @ np.array([c[name] for name in CRASH])
    return np.asarray(1 / (1 + np.exp(-log_odds)))
