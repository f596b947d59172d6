# SPDX-License-Identifier: Apache-2.0
"""Predict published runs with the planner's model of times, and constants fitted on other runs.

    python benchmarks/plan_predict.py RUNS.csv --out FILE

RUNS.csv has one of the formats of benchmarks/planning/published.py. FILE gets its rows with the
columns predicted_step_s, predicted_tok_s_gpu, predicted_mem_gib, predicted_fits and
predicted_reason, the reason why a row cannot be predicted. The exit code is 1 if no row fits, 2 if
a file is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planning.predict import predict, write  # noqa: E402
from benchmarks.planning.published import read_table  # noqa: E402
from tools.command_line import error_line  # noqa: E402


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="a CSV of published runs")
    parser.add_argument("--out", type=Path, required=True, help="CSV that gets the predictions")
    args = parser.parse_args(argv)
    try:
        table = read_table(args.runs)
        found = predict(table.rows)
        write(args.out, table, found)
    except (OSError, ValueError) as error:
        print(error_line("plan_predict.py", error), file=sys.stderr)
        return 2
    left = f", {len(table.reasons)} not: predicted_reason" * bool(table.reasons)
    fit = int(found.fits.sum())
    print(f"{len(table.rows)} rows predicted{left}, {fit} fit: {args.out}")
    return 0 if fit else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
