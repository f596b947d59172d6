# SPDX-License-Identifier: Apache-2.0
"""Estimate the odds that a run of nanotron on the Playbook's cluster stalls, or that it crashes.

They are fitted on the runs of that table (benchmarks/plan_fit.py) and hold only for that cluster.
They are reported beside the time of a run and are not part of it.

Some runs of the table stall: each message between stages takes about a quarter of a second. On the
branch `nouamane/bench2` of nanotron a rank that sends or receives the sizes of a tensor polls with
sleeps of 0.1 s. The table has no column with the version of a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.planning.foreign_runs import ForeignRuns, stacked
from benchmarks.planning.published import Row
from forecast.planner.runs import Array, Runs
from training.files.untrusted import read_json

PROFILE = "nanotron_h100"
FITTED = Path(__file__).with_name(f"odds_{PROFILE}.json")
NEAR = 0.7 * 80 * 2**30  # bytes, without fragmentation, from which a GPU of 80 GiB is nearly full
STALL = {  # log odds of a stall
    "stall_base": "on one node",
    "stall_nodes": "added per 16 nodes",
    "stall_dp": "added per doubling of dp on 64 nodes, in a pipeline",
    "stall_pp": "added in a pipeline",
    "stall_hooks": "added if hooks reduce the gradients (no ZeRO), pp 1",
    "stall_hooks_pp": "the same in a pipeline of over 8 micro-batches",
    "stall_crossing": "added in a pipeline, per additional node of a tp group",
    "stall_near": "added in a pipeline whose first rank is nearly full",
}
MESSAGE, TENSOR, SUM = 0.25, 0.7, 0.8  # seconds of a stall: stall_seconds
CRASH = {  # reasons are independent: each applies to the runs that survive the others
    "crash_base": "share of the runs that crash for no known reason",
    "crash_memory": "log odds per e-fold of predicted memory over a GPU's memory",
    "crash_middle": "log of the predicted share of a GPU's memory at which half of the runs crash",
    "crash_idle": "share of the runs with an idle pipeline rank",
    "crash_stall": "share of the runs that certainly stall",
}
START = {  # initial values of a fit
    **dict.fromkeys(STALL, 0.0), "stall_base": -8.0,
    "crash_base": 0.05, "crash_memory": 12.0, "crash_middle": 0.0, "crash_idle": 0.98,
    "crash_stall": 0.5,
}  # fmt: skip
Constants = Mapping[str, float]


def fitted() -> dict[str, float]:
    """Return the constants that benchmarks/plan_fit.py fitted."""
    return dict(read_json(FITTED)["constants"])


@dataclass(frozen=True)
class Beside:
    """The odds that are reported beside the times of runs.

    stall: probability of a stall, which prolongs a step by `seconds`. crash: probability of a
    crash.
    """

    stall: Array
    seconds: Array
    crash: Array


def beside(rows: Sequence[Row], c: Constants, gib: Array) -> Beside:
    """Return the odds of rows of the Playbook's table. gib: memory as predicted."""
    r = stacked([row.record for row in rows])
    limit = np.array([row.limit for row in rows])
    return Beside(stall_odds(c, r), stall_seconds(r), crash_odds(c, r, gib, limit))


def stall_features(r: Runs) -> Array:
    """Return [runs, features]: the factors of the constants of STALL."""
    pipeline = r.pp > 1
    hooks = (r.zero == 0) & (r.dp > 1)
    crossing = np.maximum(0.0, np.ceil(r.tp / r.node) - 1) * pipeline
    columns = (
        np.ones(len(r)), r.nodes / 16, np.log2(r.dp) * r.nodes / 64 * pipeline, pipeline,
        hooks & ~pipeline, hooks & pipeline & (r.micro_batches > 8), crossing,
        pipeline & (first_bytes(r) > NEAR),
    )  # fmt: skip
    return np.stack([np.asarray(column, dtype=float) for column in columns], 1)


def first_bytes(r: Runs) -> Array:
    """Return roughly the bytes of the first pipeline rank, without fragmentation."""
    layers = r.by_rank(r.cut)[:, 0]
    numbers = (layers * r.layer_weights + r.vocab * r.hidden) / r.tp
    kept = numbers * (8 + 12 / np.where(r.zero > 0, r.dp, 1))
    flight = layers * np.minimum(r.pp, r.micro_batches)
    each = 2 * r.micro_batch * r.sequence * (8 * r.hidden + 4 * r.ffn) / r.tp
    return np.asarray(kept + flight * each)


def stall_odds(c: Constants, r: Runs) -> Array:
    """Return the probability that each run stalls; 0 on one node."""
    log_odds = stall_features(r) @ np.array([c[name] for name in STALL])
    return np.where(r.nodes > 1, 1 / (1 + np.exp(-log_odds)), 0.0)


def stall_seconds(r: Runs) -> Array:
    """Return the seconds by which a stall prolongs a step.

    It is the largest of: MESSAGE for each message between stages, TENSOR for each micro-batch if tp
    crosses nodes, SUM for the sum of gradients.
    """
    neighbours = np.where(r.pp > 2, 2.0, r.pp - 1)
    pipeline = MESSAGE * 2 * neighbours * (r.micro_batches + 1)
    tensor = TENSOR * r.micro_batches * (r.tp > r.node)
    return np.maximum(np.maximum(pipeline, tensor), SUM * (r.dp > 1))


def crash_odds(c: Constants, r: ForeignRuns, gib: Array, limit: Array) -> Array:
    """Return the probability that each run crashes. gib: of the fullest rank; limit: of a GPU."""
    over = c["crash_memory"] * (np.log(gib / limit) - c["crash_middle"])
    memory = 1 / (1 + np.exp(-np.clip(over, -60, 60)))
    spared = (1 - c["crash_base"]) * (1 - memory) * (1 - c["crash_idle"] * r.idle)
    return np.asarray(1 - spared * (1 - c["crash_stall"] * stall_odds(c, r)))
