# SPDX-License-Identifier: Apache-2.0
"""Compare this checkout's speed with another commit's, side by side in one call.

    python benchmarks/compare_speed.py BASE [--cases tiny-fp32-1 ...] [--pairs 9] [--quick]

The measurement is Weft's side of `make bench` and `make bench-overlap` at size tiny (run_weft of
benchmarks/bench_step.py). It is made in three trees: this checkout (new), BASE (base), and a second
checkout of BASE (again). A round launches each once. Consecutive rounds have base and the others in
opposite order, so that drifts of the machine's speed affect all equally. The result of a launch is
the median of its timed steps; a round has two ratios of tokens/s:

    new/base        the comparison
    again/base      A/A: the difference of two checkouts of one commit, which is noise

A row has each ratio's median over the rounds, with a 95% interval from bootstrap samples of the
rounds. The exit code is 1 if an interval of new/base is entirely below 1.00.

BASE is a commit, or a directory with a checkout (again is then the same directory).
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_step import BATCH, SIZES, run_weft  # noqa: E402
from tools.bisect.checkouts import (  # noqa: E402
    ROOT,
    NoCheckout,
    build,
    checkout,
    describe,
    describe_here,
)

DATA_PARALLEL = f"--tensor-model-parallel-size 1 --micro-batch-size {BATCH // 2}"  # the last counts
CASES = {  # a case of bench_step.py, and additional flags
    "tiny-fp32-1": ("tiny-fp32-1", ""),
    "tiny-bf16-1": ("tiny-bf16-1", ""),
    "tiny-fp32-tp2": ("tiny-fp32-2", "--tp-comm-overlap none"),
    "tiny-fp32-tp2-overlap": ("tiny-fp32-2", "--tp-comm-overlap auto"),
    "tiny-fp32-dp2": ("tiny-fp32-2", DATA_PARALLEL),
    "tiny-bf16-tp2": ("tiny-bf16-2", "--tp-comm-overlap none"),
    "tiny-bf16-tp2-overlap": ("tiny-bf16-2", "--tp-comm-overlap auto"),
}
USUAL = list(CASES)[:5]
ORDERS = (  # of a round's launches: base alternates between first and last
    ("base", "new", "again"),
    ("new", "again", "base"),
    ("base", "again", "new"),
    ("again", "new", "base"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit, or a directory with a checkout")
    parser.add_argument(
        "--cases", nargs="+", default=USUAL, choices=CASES, metavar="CASE",
        help=f"of {', '.join(CASES)} (default: the first {len(USUAL)})",
    )  # fmt: skip
    parser.add_argument("--pairs", type=int, default=9, help="rounds, each a pair (default: 9)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a launch (default: 10)")
    parser.add_argument("--quick", action="store_true", help="a trial: 3 pairs of 3 steps")
    args = parser.parse_args()
    pairs, steps = (3, 3) if args.quick else (args.pairs, args.steps)
    if min(pairs, steps) < 1:
        parser.error("--pairs and --steps must be at least 1")
    print(f"base: {describe(args.base)}\nnew:  {describe_here()}")
    print(f"{pairs} pairs of {steps} steps; medians, and in brackets 95% intervals of a median")
    print(f"{'case':<23}{'base':>7}{'new':>7}   {'new/base':<20}   {'A/A: base/base':<20}")
    slower, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trees = {side: checkout(args.base, Path(folder) / side) for side in ("base", "again")}
            build(ROOT)
        except NoCheckout as error:
            sys.exit(f"compare_speed: {error}")
        trees["new"] = ROOT
        for name in args.cases:
            seconds = measure(name, trees, pairs, steps)
            line, fell = row(name, seconds)
            print(line, flush=True)
            slower += [name] if fell else []
    told = f"slower: {' '.join(slower)}" if slower else "every interval includes or beats 1.00"
    print(f"{told}; {time.monotonic() - begin:.0f} s")
    return 1 if slower else 0


def measure(name: str, trees: dict[str, Path], pairs: int, steps: int) -> dict[str, list[float]]:
    """Launch every tree once per round; return each side's median seconds of a step by round."""
    case, more = CASES[name]
    seconds: dict[str, list[float]] = {side: [] for side in trees}
    for at in range(pairs):
        for side in ORDERS[at % len(ORDERS)]:
            timed, _ = run_weft(case, steps, more, trees[side] / "pretrain_llama.py")
            seconds[side].append(statistics.median(timed))
    return seconds


def row(name: str, seconds: dict[str, list[float]]) -> tuple[str, bool]:
    """Return a case's line of the table, and whether its interval is entirely below 1.00."""
    tokens = BATCH * SIZES[CASES[name][0].split("-")[0]][-1]
    speed = {side: tokens / statistics.median(found) for side, found in seconds.items()}
    line = f"{name:<23}{speed['base']:>7.0f}{speed['new']:>7.0f}"
    highs = {}
    for side in ("new", "again"):
        found = [b / s for b, s in zip(seconds["base"], seconds[side], strict=True)]
        low, highs[side] = median_interval(found)
        line += f"   {statistics.median(found):.3f} [{low:.3f}, {highs[side]:.3f}]"
    fell = highs["new"] < 1.0
    return line + ("   slower" if fell else ""), fell


def median_interval(
    values: list[float], confidence: float = 0.95, resamples: int = 10_000
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of the median (Efron, Tibshirani 1993, chapter 13).

    Each resample draws len(values) values with replacement, with the same seed in every call.
    """
    drawn = np.random.default_rng(0).choice(values, (resamples, len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail])
    return float(low), float(high)


if __name__ == "__main__":
    sys.exit(main())
