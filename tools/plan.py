#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plan a run: which flags, whether it fits, how long a step takes; and predict published runs.

    python tools/plan.py MODEL CLUSTER [--tokens-per-batch N] [--seq-length N] [--top N]
    python tools/plan.py MODEL CLUSTER --why "FLAGS of pretrain_llama.py"
    python tools/plan.py MODEL CLUSTER --what-if nodes=32,seq-length=8192
    python tools/plan.py --predict RUNS.csv --out FILE

MODEL is a size such as 8B, or the config.json of Hugging Face. CLUSTER is a file like those of
tools/planner/clusters, or one of their names. docs/planning.md explains the table and how far to
trust it. The exit code is 2 where an argument or a file is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from tools.command_line import Parser, told  # noqa: E402
from tools.planner.constants import ProfileError  # noqa: E402
from tools.planner.predict import predict, write  # noqa: E402
from tools.planner.published import RowError, read_table  # noqa: E402
from tools.rehearsal.device_file import DeviceFileError  # noqa: E402


def predict_file(runs: Path, out: Path) -> str:
    """Write a table of runs with predictions beside them; return what was done in a line."""
    table = read_table(runs)
    told = predict(table.rows)
    write(out, table, told)
    return f"{len(table.rows)} rows of {runs} predicted, {int(told.fits.sum())} fit: {out}"


def build_parser() -> Parser:
    """Return the command line's parser."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--predict", type=Path, metavar="RUNS.csv", help="published runs to predict"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --predict writes")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        if args.predict is None or args.out is None:
            parser.error("--predict RUNS.csv and --out FILE are needed")
        print(predict_file(args.predict, args.out))
    except (RowError, ProfileError, DeviceFileError, OSError) as error:
        print(told("plan.py", error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
