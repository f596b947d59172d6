# SPDX-License-Identifier: Apache-2.0
"""Fit the planner's constants on published runs, one file for each framework and device.

    python benchmarks/plan_fit.py --runs FOLDER [--profile nanotron_h100] [--write]

FOLDER holds the CSV files of published runs; benchmarks/planning/other_runs.py has more. The capped
mean of |log(predicted / measured)| is minimized by coordinate descent over the constants, each in
its range in TIME of benchmarks/planning/frameworks.py, with a small penalty for leaving its initial
value. No run has a constant of its own. --write writes the constants to benchmarks/planning/fitted.
nanotron's runs that stall are left out of the fit of the time; the odds of a stall and of a crash
are fitted separately and are written to benchmarks/planning. benchmarks/plan_accuracy.py fits on a
part of the runs and tests on the others.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planning import odds, other_runs  # noqa: E402
from benchmarks.planning.foreign_runs import ForeignRuns, stacked, times  # noqa: E402
from benchmarks.planning.frameworks import FOLDER, MEMORY, TIME, defaults  # noqa: E402
from benchmarks.planning.predict import TERMS, memory, terms  # noqa: E402
from benchmarks.planning.published import Row, read_table  # noqa: E402
from forecast.planner.runs import Runs  # noqa: E402

Values = dict[str, float]
CAP = 0.5  # largest error that counts for a run, as there are failures among the runs
ROUNDS, PRICE = 20, 0.001
COMMON = (
    "matmul",
    "memory_share",
    "attention",
    "host_layer",
    "host_stage",
    "host_step",
    "layer_start",
    "sharp",
)
TENSOR = (
    "link_share",
    "link_step",
    "collective_start",
    "tp_backward",
    "host_layer_tp",
    "host_socket",
)
PIPELINE = ("message_start", "message_exposed")
SUMS = ("network_share", "network_decay", "sum_hidden_0")
KEYS = {  # the constants that the runs of a framework determine
    "nanotron": (*COMMON, *TENSOR, *PIPELINE, *SUMS, "network_step", "host_beside", "host_crossing",
                 "sum_calls", "sum_calls_0", "sum_hidden", "gather_exposed", "jitter"),
    "megatron-deepspeed": (*COMMON, *TENSOR, *PIPELINE, "sum_hidden_0", "host_recompute"),
    "fsdp": (*COMMON, "network_share", "network_step", "network_decay", "fsdp_hidden",
             "fsdp_least", "jitter", "matmul.float8"),
    "nemo": ("matmul", "ramp", "matmul.float8", "memory_share", "host_layer", "host_layer_tp",
             "tp_backward", "network_share", "network_step", *PIPELINE, "host_stage", "link_share",
             "jitter"),
    "megatron": ("matmul", "layer_start", "memory_share", "attention", "host_layer", "host_stage",
                 *PIPELINE),
}  # fmt: skip


def fit_time(
    start: Values,
    runs: ForeignRuns,
    measured: npt.NDArray[np.float64],
    keys: Sequence[str],
    weights: npt.NDArray[np.float64] | None = None,
) -> Values:
    """Return the constants with which predicted steps are closest to measured seconds."""
    weight = np.ones(len(measured)) if weights is None else weights

    def loss(values: Values) -> float:
        error = np.abs(np.log(times(values, runs).step / measured))
        price = sum(abs(math.log(values[key] / start[key])) for key in keys)
        return float((np.minimum(CAP, error) * weight).sum() / weight.sum() + PRICE * price)

    found, best = dict(start), loss(start)
    step = dict.fromkeys(keys, 0.35)
    for _ in range(ROUNDS):
        for key in keys:
            for way in (1, -1):
                tried = found[key] * math.exp(way * step[key])
                other = {**found, key: min(max(tried, TIME[key].low), TIME[key].high)}
                if (there := loss(other)) < best - 1e-7:
                    found, best = other, there
                    step[key] = min(step[key] * 1.3, 0.6)
                    break
            else:
                step[key] *= 0.55
    return found


def fit_odds(rows: Sequence[Row], c: Values) -> Values:
    """Return the constants of odds.py. rows: runs of nanotron; c: the constants of their times."""
    ok = timed_rows(rows)
    runs, measured = stacked([row.record for row in ok]), step_seconds(ok)
    trouble = [row for row in rows if row.crashed and hooked(row)]
    labels = np.concatenate([stalled_runs(c, runs, measured), np.ones(len(trouble), dtype=bool)])
    found = fit_stalls(stacked([row.record for row in [*ok, *trouble]]), labels)
    return fit_crashes(found, rows, c)


def fit_stalls(runs: Runs, stalled: npt.NDArray[np.bool_]) -> Values:
    """Return the log odds of a stall, by logistic regression with a small penalty on weights."""
    several = runs.nodes > 1
    weights = logistic(list(odds.STALL), odds.stall_features(runs)[several], stalled[several])
    return {**odds.START, **weights}


def fit_crashes(c: Values, rows: Sequence[Row], planner: Values) -> Values:
    """Return the constants of CRASH of maximum likelihood.

    planner: the constants by which memory is predicted.
    """
    runs = stacked([row.record for row in rows])
    limit = np.array([row.limit for row in rows])
    gib = memory(planner, runs)
    ran = {key(row) for row in rows if not row.crashed}
    crashed = np.array([key(row) not in ran for row in rows])

    def loss(values: Values) -> float:
        told = np.clip(odds.crash_odds(values, runs, gib, limit), 1e-4, 1 - 1e-4)
        return float(-np.log(np.where(crashed, told, 1 - told)).mean())

    return descend(loss, c, dict.fromkeys(odds.CRASH, 0.4), moved)


def descend(
    loss: Callable[[Values], float],
    start: Values,
    step: Values,
    move: Callable[[str, float, float], float],
) -> Values:
    """Return the constants of the least loss, by coordinate descent with decreasing steps."""
    found, best = dict(start), loss(start)
    for _ in range(2 * ROUNDS):
        for name in step:
            for way in (1, -1):
                other = {**found, name: move(name, found[name], way * step[name])}
                if (there := loss(other)) < best - 1e-7:
                    found, best = other, there
                    break
            else:
                step[name] *= 0.6
    return found


def key(row: Row) -> str:
    """Return a key that is equal for the rows of one configuration."""
    return f"{row.model} {sorted(row.record.items())}"


def moved(name: str, value: float, by: float) -> float:
    """Return a constant of CRASH after a step; shares move by a factor of their odds."""
    if name == "crash_middle":
        return value + by / 2
    if name == "crash_memory":
        return value * math.exp(by)
    share = value * math.exp(3 * by) / (1 - value)
    return share / (1 + share)


def logistic(
    names: Sequence[str], features: npt.NDArray[np.float64], label: npt.NDArray[np.bool_]
) -> Values:
    """Return the weights of [runs, names] in the log odds of a label."""
    weights = np.zeros(features.shape[1])
    price = np.array([1e-3, *[0.2] * (features.shape[1] - 1)])
    for _ in range(50):
        share = 1 / (1 + np.exp(-features @ weights))
        slope = features.T @ (share - label) + price * weights
        curve = (features * (share * (1 - share))[:, None]).T @ features + np.diag(price)
        weights = weights - np.linalg.solve(curve, slope)
    return dict(zip(names, map(float, weights), strict=True))


def stalled_runs(
    c: Values, runs: ForeignRuns, measured: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return whether each run stalls: whether it is slower than predicted by enough.

    Enough is more than 0.4 of a predicted stall and 0.3 of the predicted step.
    """
    alone = times(c, runs).step
    extra = measured - alone
    return np.asarray(
        (runs.nodes > 1) & (extra > 0.4 * odds.stall_seconds(runs)) & (extra > 0.3 * alone)
    )


def fit_memory(start: Values, runs: Runs, measured: npt.NDArray[np.float64]) -> Values:
    """Return the constants with which predicted GiB are closest to measured ones."""
    names = [name for name in TERMS if start[name] > 0]
    parts = terms(runs)

    def loss(values: Values) -> float:
        told = (parts @ np.array([values[name] for name in TERMS])).max(1)
        price = sum(abs(math.log(values[name] / start[name])) for name in names)
        error = np.minimum(CAP, np.abs(told / measured - 1))
        return float(error.mean() + PRICE * price)

    step = dict.fromkeys(names, 0.3)
    return descend(loss, start, step, lambda name, value, by: value * math.exp(by))


def timed_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.crashed and not math.isnan(row.seconds)]


def step_seconds(rows: Sequence[Row]) -> npt.NDArray[np.float64]:
    """Return the measured seconds of steps, scaled to full micro-batches."""
    return np.array([row.seconds / row.filled for row in rows])


def fit(name: str, rows: Sequence[Row]) -> Values:
    """Return the constants of a profile fitted on rows."""
    framework, _, device = name.rpartition("_")
    start, ok = defaults(framework, device), timed_rows(rows)
    runs, measured, keys = stacked([row.record for row in ok]), step_seconds(ok), KEYS[framework]
    stalled = np.zeros(len(ok), dtype=bool)
    c = start
    for _ in range(2 if framework == "nanotron" else 1):  # a first fit shows which runs stall
        if framework == "nanotron":
            stalled = stalled_runs(c, runs, measured)
        c = fit_time(start, runs[~stalled], measured[~stalled], keys)
    known = np.array([not math.isnan(row.memory) for row in ok])
    gib = np.array([row.memory for row in ok])
    return fit_memory(c, runs[known], gib[known]) if known.any() else c


def hooked(row: Row) -> bool:
    """Return whether hooks sum a run's gradients in a pipeline, with few activations."""
    r = row.record
    return bool(
        r["zero"] == 0
        and r["pp"] > 1
        and r["dp"] > 1
        and r["micro_batch"] <= 2
        and r["micro_batches"] > 8
    )


def read_rows(folder: Path) -> list[Row]:
    """Return the runs of a folder's CSV files."""
    return [row for path in sorted(folder.glob("*.csv")) for row in read_table(path).rows]


def more_rows() -> list[Row]:
    """Return the runs of benchmarks/planning/other_runs.py on which constants are fitted."""
    with tempfile.TemporaryDirectory() as folder:
        return other_runs.fitted(Path(folder))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of published runs")
    parser.add_argument("--profile", help="fit this one only, such as nanotron_h100")
    parser.add_argument("--write", action="store_true", help="write benchmarks/planning/fitted")
    args = parser.parse_args(argv)
    rows = [*read_rows(args.runs), *more_rows()]
    for name in sorted({row.profile for row in rows}):
        if args.profile in (None, name):
            own = [row for row in rows if row.profile == name]
            c, keys = fit(name, own), [*KEYS[name.rpartition("_")[0]]]
            if any(row.memory == row.memory for row in own):
                keys += [*MEMORY]
            path = FOLDER / f"{name}.json" if args.write else None
            report(name, {key: c[key] for key in keys}, len(own), path)
            if name == odds.PROFILE:
                path = odds.FITTED if args.write else None
                report(f"odds of {name}", fit_odds(own, c), len(own), path)
    return 0


def report(name: str, constants: Values, runs: int, path: Path | None) -> None:
    """Print constants; write them to a file."""
    source = f"benchmarks/plan_fit.py, on {runs} published runs: docs/predictions.md"
    rounded = {key: float(f"{value:.4g}") for key, value in constants.items()}
    text = json.dumps({"source": source, "constants": rounded}, indent=1)
    print(name, text)
    if path:
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
