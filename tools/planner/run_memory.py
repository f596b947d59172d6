# SPDX-License-Identifier: Apache-2.0
"""Tell the memory of published runs from sizes: what each rank keeps, and what it has in flight.

For layouts of this repository use training/plan, as --dry-run does; this is for other frameworks,
but for nanotron, whose tensors nanotron_memory.py follows one by one.
"""

from collections.abc import Mapping

import numpy as np

from tools.planner.runs import SCHEDULES, Array, Runs

GIB = 2.0**30
TERMS = {  # each times its constant is a part of a rank's memory
    "weight_bytes": "bytes of a number that every data-parallel rank keeps below ZeRO stage 3",
    "state_bytes": "bytes of a number that ZeRO shares",
    "act_hidden": "values of 2 bytes that a layer saves for backward, in units of h / tp a token",
    "act_ffn": "the same, in units of f / tp",
    "act_scores": "bytes of an unfused attention's scores, each",
    "logit_memory": "bytes of a logit",
    "work_gib": "GiB of context, libraries and buffers",
}


def terms(r: Runs) -> Array:
    """Return [runs, pipeline ranks, TERMS]: GiB of each term for a constant of 1."""
    layers = r.by_rank(r.cut)
    number = np.arange(layers.shape[1])[None, :]
    pp, tp = r.pp[:, None], r.tp[:, None]
    home = (number == (r.head % r.pp)[:, None]).astype(float)
    first = (number == 0).astype(float)
    both = (r.tied > 0)[:, None] * home * first
    ends = (r.vocab * r.hidden)[:, None] * (home + first - both)
    numbers = (layers * r.layer_weights[:, None] + ends) / tp
    shard = (r.dp * r.cp)[:, None]
    kept = numbers / np.where(r.zero[:, None] >= 3, shard, 1)
    shared = numbers / np.where(r.zero[:, None] >= 1, shard, 1)
    t = (r.micro_batch * r.sequence / r.cp)[:, None]
    h, f = r.hidden[:, None], r.ffn[:, None]
    waiting = np.minimum(np.clip(pp - number, 1, None), r.micro_batches[:, None])
    virtual = r.virtual[:, None]
    interleaved = np.minimum(pp * (1 + (pp - 1) / (pp * virtual)), r.micro_batches[:, None])
    waiting = np.where(virtual > 1, interleaved, waiting)
    twice = r.schedule[:, None] == SCHEDULES.index("zb-2p")
    waiting = np.where(twice, np.minimum(2 * waiting, r.micro_batches[:, None]), waiting)
    again = r.recompute[:, None] > 0
    flight = np.where(again, 1.0, layers * waiting)  # layers whose activations are whole
    whole = 2 * t * h
    inputs = np.where(again, whole / np.where(r.sequence_parallel[:, None] > 0, tp, 1), 0.0)
    one = np.ones_like(numbers)
    columns = [
        kept, shared, flight * whole / tp, flight * 2 * t * f / tp,
        flight * t * r.sequence[:, None] * r.heads[:, None] / tp,
        home * t * r.vocab[:, None] / tp, one * GIB,
    ]  # fmt: skip
    every = np.stack(columns, 2) / GIB
    every[:, :, 2] += np.where(again, layers * waiting * inputs / GIB * 0.1, 0.0)
    return np.where((number < pp)[:, :, None], every, 0.0)


def memory(c: Mapping[str, float], r: Runs) -> Array:
    """Return the GiB of each run's fullest rank, at a step's fullest moment."""
    return np.asarray((terms(r) @ np.array([c[name] for name in TERMS])).max(1))
