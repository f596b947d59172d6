# SPDX-License-Identifier: Apache-2.0
"""Predict every row of a CSV of published runs: step time, rate, memory, whether it fits.

The time is that of an undisturbed run (step_time.py). The memory is computed from sizes: states and
activations in flight of each rank. Stalls of a cluster and crashes of other programs are not
predicted. Layouts of this repository have --dry-run's memory instead (rank_bytes.py).
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from benchmarks.planning.foreign_runs import stacked, times
from benchmarks.planning.frameworks import profile
from benchmarks.planning.published import GIB, Row, Table
from forecast.planner.pipeline import SCHEDULES
from forecast.planner.runs import Array, Runs
from training.data.files import write_text
from training.files.untrusted import open_plain

COLUMNS = (
    "predicted_step_s", "predicted_tok_s_gpu", "predicted_mem_gib", "predicted_fits",
    "predicted_reason",
)  # fmt: skip
POOL = 0.9  # share of a GPU's memory available to a run: the rest is lost to fragmentation
TERMS = {  # constants whose products with `terms` add up to a rank's memory
    "weight_bytes": "bytes per parameter on every data-parallel rank, below ZeRO stage 3",
    "state_bytes": "bytes per parameter that ZeRO shards",
    "act_hidden": "values of 2 bytes that a layer saves for backward, in units of h / tp per token",
    "act_ffn": "the same, in units of f / tp",
    "act_scores": "bytes per score of an unfused attention",
    "logit_memory": "bytes of a logit",
    "work_gib": "GiB of context, libraries and buffers",
}


def terms(r: Runs) -> Array:
    """Return [runs, pipeline ranks, TERMS]: GiB of each term if its constant is 1."""
    layers = r.by_rank(r.cut)
    number = np.arange(layers.shape[1])[None, :]
    pp, tp = r.pp[:, None], r.tp[:, None]
    home = (number == (r.head % r.pp)[:, None]).astype(float)
    first = (number == 0).astype(float)
    both = (r.tied > 0)[:, None] * home * first
    ends = (r.vocab * r.hidden)[:, None] * (home + first - both)
    numbers = (layers * r.layer_weights[:, None] + ends) / tp
    dealt = layers * (r.experts * r.expert_weights / r.ep)[:, None]
    shard, edp = (r.dp * r.cp)[:, None], r.edp[:, None]
    above, share = r.zero[:, None] >= 3, r.zero[:, None] >= 1
    states = numbers / np.where(above, shard, 1) + dealt / np.where(above, edp, 1)
    shared = numbers / np.where(share, shard, 1) + dealt / np.where(share, edp, 1)
    t = (r.micro_batch * r.sequence / r.cp)[:, None]
    h, f = r.hidden[:, None], r.ffn[:, None]
    waiting = np.minimum(np.clip(pp - number, 1, None), r.micro_batches[:, None])
    virtual = r.virtual[:, None]
    interleaved = np.minimum(pp * (1 + (pp - 1) / (pp * virtual)), r.micro_batches[:, None])
    waiting = np.where(virtual > 1, interleaved, waiting)
    twice = r.schedule[:, None] == SCHEDULES.index("zb-2p")
    waiting = np.where(twice, np.minimum(2 * waiting, r.micro_batches[:, None]), waiting)
    again = r.recompute[:, None] > 0
    flight = np.where(again, 1.0, layers * waiting)  # number of layers with all activations stored
    rows = 2 * t * h
    inputs = np.where(again, rows / np.where(r.sequence_parallel[:, None] > 0, tp, 1), 0.0)
    one = np.ones_like(numbers)
    columns = [
        states, shared, flight * rows / tp, flight * 2 * t * f / tp,
        flight * t * r.sequence[:, None] * r.heads[:, None] / tp,
        home * t * r.vocab[:, None] / tp, one * GIB,
    ]  # fmt: skip
    every = np.stack(columns, 2) / GIB
    every[:, :, 2] += np.where(again, layers * waiting * inputs / GIB * 0.1, 0.0)
    return np.where((number < pp)[:, :, None], every, 0.0)


def memory(c: Mapping[str, float], r: Runs) -> Array:
    """Return the peak GiB of each run's fullest rank."""
    return np.asarray((terms(r) @ np.array([c[name] for name in TERMS])).max(1))


@dataclass(frozen=True)
class Predictions:
    """Predictions for rows, in their order.

    seconds: of a step. rate: tokens per second and GPU. gib: of the fullest rank. fits: whether gib
    is at most POOL of a GPU's and no pipeline rank is idle. mfu: of the bfloat16 peak, with
    attention counted as computed.
    """

    seconds: Array
    rate: Array
    gib: Array
    fits: Array
    mfu: Array


KINDS = tuple(field.name for field in fields(Predictions))


def predict(
    rows: Sequence[Row], constants: Mapping[str, Mapping[str, float]] | None = None
) -> Predictions:
    """Return predictions. constants: by profile, instead of those of benchmarks/planning/fitted."""
    values = {name: np.zeros(len(rows)) for name in KINDS}
    for name in dict.fromkeys(row.profile for row in rows):
        c = (constants or {}).get(name) or profile(name)
        at = np.array([n for n, row in enumerate(rows) if row.profile == name])
        runs = stacked([rows[n].record for n in at])
        filled = np.array([rows[n].filled for n in at])
        limit = np.array([rows[n].limit for n in at])
        seconds, gib = times(c, runs).step * filled, memory(c, runs)
        values["seconds"][at] = seconds
        values["rate"][at] = runs.tokens * filled / seconds / runs.gpus
        values["mfu"][at] = values["rate"][at] * runs.flops / c["peak.bfloat16"]
        values["gib"][at] = gib
        values["fits"][at] = (gib <= POOL * limit) & (runs.idle == 0)
    return Predictions(**values)


def write(path: Path, table: Table, predictions: Predictions) -> None:
    """Write the table's lines, with COLUMNS appended.

    Lines that are not runs, or have no finite prediction, have a reason instead.
    """
    found = dict(zip(table.places, range(len(table.rows)), strict=True))
    text = io.StringIO(newline="")
    out = csv.writer(text)
    out.writerow([*table.columns, *COLUMNS])
    for at, line in enumerate(table.lines):
        n, reason = found.get(at), table.reasons.get(at, "")
        if n is not None and not np.isfinite([predictions.seconds[n], predictions.gib[n]]).all():
            n, reason = None, "its sizes give no finite time or memory"
        cells = [""] * (len(COLUMNS) - 1)
        if n is not None:
            cells = [f"{predictions.seconds[n]:.6g}", f"{predictions.rate[n]:.6g}",
                     f"{predictions.gib[n]:.4g}",
                     "yes" if predictions.fits[n] else "no"]  # fmt: skip
        out.writerow([*(line[column] for column in table.columns), *cells, reason])
    write_text(path, text.getvalue(), _is_ours)


def _is_ours(path: Path) -> bool:
    """Return whether a table has the columns that `write` adds."""
    try:
        with open_plain(path) as file:
            head = file.readline(1 << 16).decode()
    except (OSError, ValueError):
        return False
    return not head or head.rstrip().endswith(",".join(COLUMNS))
