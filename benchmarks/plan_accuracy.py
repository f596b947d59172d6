# SPDX-License-Identifier: Apache-2.0
"""Print a table of the planner's errors on published runs that are held out of the fit.

    python benchmarks/plan_accuracy.py --runs FOLDER

FOLDER holds the CSV files of published runs (columns: see benchmarks/planning/published.py). For
each line of the table the constants are fitted on rows that the line does not test: for a model of
the Playbook on its other models; for vTrain on the other folds of (GPUs, hidden, layers) groups;
for the table of several sources on the other models. Targets are printed beside the figures. Times
and memory are those of `benchmarks/plan_predict.py`, for an undisturbed run; below them are the
odds of a stall and of a crash (benchmarks/planning/odds.py), which are not part of a time.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plan_fit import (  # noqa: E402
    Values,
    fit,
    fit_odds,
    more_rows,
    read_rows,
    stalled_runs,
    step_seconds,
)
from benchmarks.planning import odds, other_runs  # noqa: E402
from benchmarks.planning.foreign_runs import stacked  # noqa: E402
from benchmarks.planning.predict import KINDS, Predictions, predict  # noqa: E402
from benchmarks.planning.published import Row  # noqa: E402
from forecast.device_file import read_device  # noqa: E402

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
Truths = npt.NDArray[np.bool_]
WITHIN = 0.08  # target of the mean error of tokens/s, at an MFU of at least 20 %
FOLDS, SMALL = 6, 20  # SMALL: least number of rows of a cell
USE = f"{other_runs.TUNED}, held out of the fit"
APART, DRAWS = 0.14, 400  # difference of repeats, median of five pairs: the source's README


def line(name: str, value: float, target: str, met: bool | None) -> None:
    """Print one line of the table.

    All rows are USE: constants are fitted without them, but the form of the model was chosen after
    a look at their errors.
    """
    word = {True: "met", False: "NOT MET", None: ""}[met]
    print(f"{name:88} {value:8.3f}  {target:12} {word:8} {USE}")


def at_most(name: str, value: float, target: float) -> None:
    line(name, value, f"<= {target:g}", value <= target)


def at_least(name: str, value: float, target: float) -> None:
    line(name, value, f">= {target:g}", value >= target)


def mape(told: Array, measured: Array) -> float:
    return float(np.mean(np.abs(told / measured - 1)))


def ranks(values: Array) -> Array:
    """Return the ranks of values; equal values have the mean of their ranks."""
    order = np.argsort(values, kind="stable")
    place = np.empty(len(values))
    place[order] = np.arange(1, len(values) + 1)
    sums = {value: place[values == value].mean() for value in np.unique(values)}
    return np.array([sums[value] for value in values])


def spearman(told: Array, measured: Array) -> float:
    return float(np.corrcoef(ranks(told), ranks(measured))[0, 1])


def auc(score: Array, label: npt.NDArray[np.bool_]) -> float:
    """Return the share of (crashed, ok) pairs that a score orders correctly."""
    crashed, ok = int(label.sum()), int((~label).sum())
    if not crashed or not ok:
        return float("nan")
    return float((ranks(score)[label].sum() - crashed * (crashed + 1) / 2) / (crashed * ok))


def rates(rows: Sequence[Row]) -> Array:
    """Return measured tokens per second and GPU; 0 for a crashed run."""
    runs = stacked([row.record for row in rows])
    seconds = np.array([row.seconds for row in rows])
    filled = np.array([row.filled for row in rows])
    found = runs.tokens * filled / np.where(seconds > 0, seconds, np.nan) / runs.gpus
    return np.nan_to_num(found)


def full_flops(rows: Sequence[Row]) -> Array:
    """Return FLOPs per token, attention without a causal mask, as the Playbook counts."""
    runs = stacked([row.record for row in rows])
    return (
        runs.flops + np.where(runs.causal > 0, 6.0, 0.0) * runs.layers * runs.sequence * runs.hidden
    )


def folds(rows: Sequence[Row], part: Callable[[Row], str]) -> Iterator[tuple[Places, Places]]:
    """Yield the indices of each part of a profile's rows, and those of its other parts."""
    for profile in dict.fromkeys(row.profile for row in rows):
        own = [n for n, row in enumerate(rows) if row.profile == profile]
        for name in dict.fromkeys(part(rows[n]) for n in own):
            tested = [n for n in own if part(rows[n]) == name]
            yield np.array(tested), np.array([n for n in own if part(rows[n]) != name])


def held_out(
    rows: Sequence[Row], part: Callable[[Row], str]
) -> tuple[Predictions, Array, dict[str, Values]]:
    """Return predictions of each row by constants fitted on the other parts of its profile.

    Return also the rates at a constant MFU, that of the other parts' median run, and the constants
    by part.
    """
    told = {name: np.zeros(len(rows)) for name in KINDS}
    constant, measured, flops = np.zeros(len(rows)), rates(rows), full_flops(rows)
    fitted: dict[str, Values] = {}
    more = more_rows()
    for at, others in folds(rows, part):
        profile = rows[at[0]].profile
        c = fitted[part(rows[at[0]])] = fit(
            profile, [*(rows[n] for n in others), *(row for row in more if row.profile == profile)]
        )
        found = predict([rows[n] for n in at], {profile: c})
        for kind, values in told.items():
            values[at] = getattr(found, kind)
        good = others[measured[others] > 0]
        constant[at] = np.median((measured * flops)[good]) / flops[at]
    return Predictions(**told), constant, fitted


def peaks(rows: Sequence[Row]) -> Array:
    """Return the peak of each row's GPU in bf16, in FLOP/s."""
    found = {name: read_device(name).peak("bfloat16") for name in ("a100", "h100")}
    return np.array([found["a100" if row.profile.endswith("a100") else "h100"] for row in rows])


def rules_of_thumb(rows: Sequence[Row], told: Array) -> Array:
    """Return tokens per second and GPU by Megatron's rules of thumb.

    The MFU is 0.4; each doubling of tp costs 10 %, tp across nodes half of it; with v stages per
    rank the bubble is (pp - 1) / v out of micro-batches + (pp - 1) / v.
    """
    runs = stacked([row.record for row in rows])
    share = 0.4 * 0.9 ** np.log2(runs.tp) * np.where(runs.tp > runs.node, 0.5, 1.0)
    share = share * runs.micro_batches / (runs.micro_batches + (runs.pp - 1) / runs.virtual)
    return share * peaks(rows) / full_flops(rows) + 0 * told


def ceiling(measured: Array) -> Array:
    """Return [DRAWS, 2]: Spearman and regret of predictions equal to the true rates.

    The measured rates are taken as true ones, and noisy measurements of them are drawn with the
    noise of the data's own repeats.
    """
    draw = np.random.default_rng(0)
    sigma = np.log1p(APART) / (0.6745 * 2**0.5)  # of one run, from the difference of pairs
    found = []
    for _ in range(DRAWS):
        noisy = measured * np.exp(draw.normal(0, sigma, len(measured)))
        regret = 1 - noisy[np.argmax(measured)] / noisy.max()
        found.append((spearman(measured, noisy), regret))
    return np.array(found)


def measured_of(rows: Sequence[Row], among: Places, pick: int, measured: Array) -> float:
    """Return the measured rate of a run, the best of its repeats."""
    return max(float(measured[n]) for n in among if rows[n].record == rows[pick].record)


def cells(rows: Sequence[Row], told: Predictions, measured: Array, ok: Truths, of: str) -> None:
    """Print Spearman and regret of each cell, beside those of perfect predictions (`ceiling`).

    A cell is a model on a number of nodes. ok: the runs that count. of: a description of them. The
    last column is the regret of picking by `rules_of_thumb` among the runs predicted to fit.
    """
    ours, perfect, thumb = [], [], []
    rules = rules_of_thumb(rows, told.rate)
    print(f"  {of}; perfect: predictions equal to true rates, if repeats differ by {APART:.0%}: "
          "median (5 to 95 %)")  # fmt: skip
    for cell in dict.fromkeys(row.group for row in rows):
        at = np.array([n for n, row in enumerate(rows) if row.group == cell])
        fine = at[ok[at]]
        if len(fine) < SMALL:
            continue
        rank = spearman(told.rate[fine], measured[fine])
        allowed = fine[told.fits[fine] > 0]
        regret, by_rules = (
            1 - measured_of(rows, fine, allowed[np.argmax(rate[allowed])], measured)
            / float(measured[fine].max()) for rate in (told.rate, rules)
        )  # fmt: skip
        known = ceiling(measured[fine])
        low, middle, high = np.quantile(known, [0.05, 0.5, 0.95], axis=0)
        ours.append((rank, regret))
        perfect.append(middle)
        thumb.append(by_rules)
        print(f"  {cell:12} {len(fine):4} runs  Spearman {rank:6.3f}  perfect {middle[0]:.3f} "
              f"({low[0]:.3f} to {high[0]:.3f})   regret {regret:6.3f}  perfect {middle[1]:.3f} "
              f"({low[1]:.3f} to {high[1]:.3f})  rules {by_rules:.3f}")  # fmt: skip
    for what, regret in (("median of cells", np.median(thumb)), ("worst cell", max(thumb))):
        name = f"Playbook, {of}, rules of thumb: regret of the plan picked, {what}"
        line(name, float(regret), "reported", None)
    for which, values in (("the planner", np.array(ours)), ("perfect", np.array(perfect))):
        own = which == "the planner"
        name = f"Playbook, {of}, {which}"
        for what, value, target in (
            ("Spearman of the worst cell", values[:, 0].min(), 0.9),
            ("Spearman, median of cells", float(np.median(values[:, 0])), 0.9),
            ("regret of the plan picked, median of cells", float(np.median(values[:, 1])), 0.05),
            ("regret of the plan picked, worst cell", values[:, 1].max(), 0.15),
        ):
            if not own:
                line(f"{name}: {what}", value, "reported", None)
            elif "Spearman" in what:
                at_least(f"{name}: {what}", value, target)
            else:
                at_most(f"{name}: {what}", value, target)


def comparison(rows: Sequence[Row], told: Array, measured: Array, ok: Truths) -> float:
    """Return the median error of the ratio of two runs' rates, over the pairs of each cell."""
    errors = []
    off = np.log(np.where(ok, told / np.where(ok, measured, 1), 1))
    for cell in dict.fromkeys(row.group for row in rows):
        own = off[[n for n, row in enumerate(rows) if row.group == cell and ok[n]]]
        errors += list(np.abs(own[:, None] - own[None, :])[np.triu_indices(len(own), 1)])
    return float(np.median(errors))


def playbook(rows: Sequence[Row]) -> None:
    told, constant, fitted = held_out(rows, lambda row: row.model)
    crashed = np.array([row.crashed for row in rows])
    measured = rates(rows)
    gib = np.array([row.memory for row in rows])
    mfu = measured * full_flops(rows) / peaks(rows)
    ok = (measured > 0) & ~crashed
    for at, others in folds(rows, lambda row: row.model):
        own = np.zeros(len(rows), dtype=bool)
        own[at] = True
        model = rows[at[0]].model
        name = f"Playbook {model}, fitted on the others"
        high, low = ok & own & (mfu >= 0.2), ok & own & (mfu < 0.2)
        error = np.abs(told.rate / np.where(ok, measured, 1) - 1)
        at_most(f"{name}: MAPE of tokens/s, MFU >= 20 %, {high.sum()} runs",
                float(error[high].mean()), WITHIN)  # fmt: skip
        at_most(f"{name}: median error below, {low.sum()} runs", float(np.median(error[low])), 0.30)
        line(f"{name}: MAPE below", float(error[low].mean()), "reported", None)
        known = ok & own & ~np.isnan(gib)
        at_most(
            f"{name}: MAPE of memory, {known.sum()} runs", mape(told.gib[known], gib[known]), 0.10
        )
        first = own & np.array([row.record["pp"] == 1 for row in rows])
        at_least(f"{name}: AUC by memory, pp 1", auc(told.gib[first], crashed[first]), 0.95)
        line(f"{name}: AUC by memory, all", auc(told.gib[own], crashed[own]), "reported", None)
        beside(name, [rows[n] for n in at], [rows[n] for n in others], fitted[model])
    stall = np.zeros(len(rows), dtype=bool)
    for model, c in fitted.items():
        timed = np.flatnonzero(ok & np.array([row.model == model for row in rows]))
        own_rows = [rows[n] for n in timed]
        runs = stacked([row.record for row in own_rows])
        stall[timed] = stalled_runs(c, runs, step_seconds(own_rows))
    cells(rows, told, measured, ok, "all runs that ran")
    cells(rows, told, measured, ok & ~stall, "without the runs that stall")
    compared = ok & ~stall & (mfu >= 0.2)
    line("Playbook: median error of a comparison of two runs of a cell, MFU >= 20 %, no stall",
         comparison(rows, told.rate, measured, compared), "reported", None)  # fmt: skip
    against("Playbook", rows, told.rate, constant, measured, ok)
    for which, part in (("stall", ok & stall), ("do not stall", ok & ~stall)):
        share = float(np.abs(told.rate / np.where(ok, measured, 1) - 1)[part].sum()) / ok.sum()
        line(f"Playbook: of that, from the {part.sum()} runs that {which}", share, "reported", None)


def beside(name: str, rows: Sequence[Row], others: Sequence[Row], c: Values) -> None:
    """Print how well the odds predict stalls and crashes of rows. c: fitted on `others`."""
    told = predict(rows, {rows[0].profile: c})
    found = odds.beside(rows, fit_odds(others, c), told.gib)
    crashed = np.array([row.crashed for row in rows])
    timed = np.array([not row.crashed and row.seconds > 0 for row in rows])
    ok = [row for row, whether in zip(rows, timed, strict=True) if whether]
    runs, seconds = stacked([row.record for row in ok]), step_seconds(ok)
    stalled = stalled_runs(c, runs, seconds)
    line(f"{name}: of these, runs that stall", int(stalled.sum()), f"of {len(ok)}", None)
    line(f"{name}: AUC by the odds of a stall", auc(found.stall[timed], stalled), "reported", None)
    errors = np.abs(told.rate[timed] / rates(ok) - 1)[~stalled]
    line(f"{name}: median error of the {len(errors)} that do not stall",
         float(np.median(errors)), "reported", None)  # fmt: skip
    line(f"{name}: AUC by the odds of a crash", auc(found.crash, crashed), "reported", None)


def against(name: str, rows: Sequence[Row], told: Array, constant: Array, measured: Array,
            ok: npt.NDArray[np.bool_]) -> None:  # fmt: skip
    """Print the errors of the planner, a constant MFU and Megatron's rules, over all ok runs."""
    ours = mape(told[ok], measured[ok])
    line(f"{name}: MAPE of tokens/s over all {ok.sum()} ok runs", ours, "reported", None)
    rules = rules_of_thumb(rows, told)
    for other, values in (("constant MFU", constant), ("rules of thumb", rules)):
        theirs = mape(values[ok], measured[ok])
        line(f"{name}: the same by {other}", theirs, ">= 2x ours", theirs >= 2 * ours)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder of published runs")
    args = parser.parse_args(argv)
    rows = read_rows(args.runs)
    playbook([row for row in rows if row.source == "ultrascale"])
    vtrain = [row for row in rows if row.source == "vtrain"]
    groups = {name: n % FOLDS for n, name in enumerate(sorted({row.group for row in vtrain}))}
    several = [row for row in rows if row.source not in ("ultrascale", "vtrain")]
    ratio = [row for row in several if row.source == "megatron"]
    others = [row for row in several if row.source != "megatron"]
    for name, own, part, target in (
        (f"vTrain, {FOLDS} folds of whole groups", vtrain, lambda r: str(groups[r.group]), 0.07),
        ("runs.csv, one model size left out, but zero bubble", others, lambda r: r.model, 0.08),
        ("zero bubble, one model size left out", ratio, lambda r: r.model, 0.08),
    ):
        if not own:
            continue
        told, constant, _ = held_out(own, part)
        measured = rates(own)
        ok = measured > 0
        at_most(f"{name}: MAPE of step time, {ok.sum()} runs",
                mape(measured[ok], told.rate[ok]), target)  # fmt: skip
        high = ok & (measured * full_flops(own) / peaks(own) >= 0.2)
        at_most(f"{name}: MAPE of tokens/s, MFU >= 20 %, {high.sum()} runs",
                mape(told.rate[high], measured[high]), WITHIN)  # fmt: skip
        against(name, own, told.rate, constant, measured, ok)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
