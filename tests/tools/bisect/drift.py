# SPDX-License-Identifier: Apache-2.0
"""How far do two layouts drift apart by rounding, step by step? Beside it: what bisect allows.

    python tests/tools/bisect/drift.py [STEPS]

One rank of the small model of planted.py against tp 2, dp 2, cp 2 and micro-batches of 1, in three
dtypes at two learning rates. Of some steps: how far the weights are apart that it begins with, how
far the gradients are, all of them and the worst tensor, by what times the former; and whether
tools/bisect_runs.py would name a step.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.tools.bisect.planted import BASE, CP, TP  # noqa: E402
from tools.bisect.lines import Lines, different_sketches, first_step, read  # noqa: E402
from tools.bisect.ranks import ROOT, Program, run  # noqa: E402
from tools.compare.first_difference import allowed  # noqa: E402

PAIRS = {"tp2": (TP, 2), "dp2": ("", 2), "cp2": (CP, 2), "micro": ("--micro-batch-size 1", 1)}
SHOWN = (2, 3, 4, 6, 8, 12, 16, 20, 30, 50, 100)


def trained(folder: Path, flags: str, ranks: int, steps: int) -> Lines:
    """Train with a line of digests a step, and read them."""
    argv = (*BASE.split(), *flags.split(), "--train-iters", str(steps))
    more = f"--log-json {folder}/log.jsonl --log-digests 1 --log-interval 1".split()
    run(Program(ROOT, ROOT / "pretrain_llama.py", argv, ranks), folder, more)
    return read(folder)


def main(steps: int) -> None:
    """Print a row for each pair and step."""
    print("dtype   lr    pair   step  weights  gradients  worst    times  worst")
    for dtype in ("", "--bf16", "--fp64"):
        for rate in ("1e-2", "1e-3"):
            flags = f"{dtype} --lr {rate} --min-lr 1e-4"
            with tempfile.TemporaryDirectory() as work:
                one = trained(Path(work, "one"), flags, 1, steps)
                for name, (more, ranks) in PAIRS.items():
                    other = trained(Path(work, name), f"{flags} {more}", ranks, steps)
                    rows(f"{dtype.strip('-') or 'fp32':<7} {rate}  {name:<6}", one, other)


def rows(what: str, one: Lines, other: Lines) -> None:
    """Print the rows of a pair."""
    sides, notes = (one, other), list[str]()
    for i in (i for i in SHOWN if i in one.steps):
        begin, _ = different_sketches(one.steps[i - 1], other.steps[i - 1], "weight", sides)
        far, each = different_sketches(one.steps[i], other.steps[i], "gradient", sides)
        worst = max(each.values())
        times = [f"{x / begin:7.1f}" if begin else "      -" for x in (far, worst)]
        print(f"{what} {i:4d}  {begin:.1e}  {far:.1e}    {worst:.1e}  {'  '.join(times)}")
    found = first_step(one, other, allowed(one.config, other.config), notes)
    print(f"{what} {found.text if found else 'no step is named'}{''.join(f'; {n}' for n in notes)}")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 30)
