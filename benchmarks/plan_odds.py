# SPDX-License-Identifier: Apache-2.0
"""Write the odds of a stall and of a crash beside the times of runs of the Playbook's table.

    python benchmarks/plan_odds.py RUNS.csv --out FILE

RUNS.csv has the columns of the Ultra-Scale Playbook's table. FILE gets each run's time and memory
as predicted by `benchmarks/plan_predict.py`, and the odds by benchmarks/planning/odds.py for that
cluster: odds_of_stall, stall_s (seconds by which a stall prolongs a step) and odds_of_crash.
"""

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planning import odds  # noqa: E402
from benchmarks.planning.predict import predict  # noqa: E402
from benchmarks.planning.published import read_table  # noqa: E402

COLUMNS = ("predicted_step_s", "odds_of_stall", "stall_s", "predicted_mem_gib", "odds_of_crash")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="a CSV in the form of the Playbook's table")
    parser.add_argument("--out", type=Path, required=True, help="CSV that gets the odds")
    args = parser.parse_args(argv)
    table = read_table(args.runs)
    other = [row.profile for row in table.rows if row.profile != odds.PROFILE]
    if other or not table.rows:
        what = f"runs of {other[0]}" if other else "no runs"
        print(f"{args.runs}: has {what}; odds are known for {odds.PROFILE} only", file=sys.stderr)
        return 2
    told = predict(table.rows)
    found = odds.beside(table.rows, odds.fitted(), told.gib)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow([*table.columns, *COLUMNS])
        for n, place in enumerate(table.places):
            cells = (
                f"{told.seconds[n]:.6g}", f"{found.stall[n]:.3f}", f"{found.seconds[n]:.4g}",
                f"{told.gib[n]:.4g}", f"{found.crash[n]:.3f}",
            )  # fmt: skip
            out.writerow([*(table.lines[place][column] for column in table.columns), *cells])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
