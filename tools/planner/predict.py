# SPDX-License-Identifier: Apache-2.0
"""Predict every row of a CSV of published runs: step time, rate, memory, whether it fits."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.planner import nanotron_memory
from tools.planner.constants import profile
from tools.planner.crashes import crash_odds
from tools.planner.known import GIB
from tools.planner.published import Row, Table
from tools.planner.run_memory import memory
from tools.planner.runs import Array, Runs, stacked
from tools.planner.step_time import times

COLUMNS = (
    "predicted_step_s", "predicted_tok_s_gpu", "predicted_mem_gib", "predicted_fits",
    "predicted_crash", "predicted_reason",
)  # fmt: skip
POOL = 0.9  # share of a GPU's memory that a run can count on: the allocator's pool breaks up


@dataclass(frozen=True)
class Predictions:
    """What is predicted of rows, in their order.

    seconds: of a step. rate: tokens a second and GPU. gib: of the fullest rank, or of the one that
    a table tells. fits: that memory is enough on all ranks, and no pipeline rank is idle. crash:
    share of such runs that crash. mfu: of the bfloat16 peak, attention counted as the run computes
    it.
    """

    seconds: Array
    rate: Array
    gib: Array
    fits: Array
    crash: Array
    mfu: Array


KINDS = ("seconds", "rate", "gib", "fits", "crash", "mfu")


def predict(
    rows: Sequence[Row], constants: Mapping[str, Mapping[str, float]] | None = None
) -> Predictions:
    """Return predictions. constants: of profiles by name, instead of tools/planner/fitted."""
    values = {name: np.zeros(len(rows)) for name in KINDS}
    for name in dict.fromkeys(row.profile for row in rows):
        c = (constants or {}).get(name) or profile(name)
        at = np.array([n for n, row in enumerate(rows) if row.profile == name])
        own = [rows[n] for n in at]
        runs = stacked([row.record for row in own])
        filled = np.array([row.filled for row in own])
        limit = np.array([row.limit for row in own])
        seconds = times(c, runs).step * filled
        gib, most, enough = kept(name, c, runs, limit)
        values["seconds"][at] = seconds
        values["rate"][at] = runs.tokens * filled / seconds / runs.gpus
        values["mfu"][at] = values["rate"][at] * runs.flops / c["peak"]
        values["gib"][at] = gib
        values["fits"][at] = enough & (runs.idle == 0)
        values["crash"][at] = crash_odds(c, runs, most, limit)
    return Predictions(**values)


def kept(
    name: str, c: Mapping[str, float], runs: Runs, limit: Array
) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Return GiB as a profile's table has them, GiB of the fullest rank, whether all ranks fit."""
    if name.startswith("nanotron_"):
        return nanotron_memory.memory(c, runs, limit * GIB / 1e9)  # a GPU of 80 GB has 80 GiB
    gib = memory(c, runs)
    return gib, gib, gib <= POOL * limit


def write(path: Path, table: Table, told: Predictions) -> None:
    """Write the table as it stood with COLUMNS at the end of each line.

    A line that is no run, or whose numbers give no finite prediction, has a reason instead.
    """
    found = dict(zip(table.places, range(len(table.rows)), strict=True))
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow([*table.columns, *COLUMNS])
        for at, line in enumerate(table.lines):
            n, reason = found.get(at), table.reasons.get(at, "")
            if n is not None and not np.isfinite([told.seconds[n], told.gib[n]]).all():
                n, reason = None, "its sizes give no finite time or memory"
            cells = [""] * (len(COLUMNS) - 1)
            if n is not None:
                cells = [f"{told.seconds[n]:.6g}", f"{told.rate[n]:.6g}", f"{told.gib[n]:.4g}",
                         "yes" if told.fits[n] else "no", f"{told.crash[n]:.3f}"]  # fmt: skip
            out.writerow([*(line[column] for column in table.columns), *cells, reason])
