# SPDX-License-Identifier: Apache-2.0
"""Predict the step time of published H100 and A100 runs, and report the errors.

    python benchmarks/predict_published.py --runs FOLDER --out FILE.csv

    python benchmarks/predict_published.py --hashes

FOLDER holds the CSV files of published runs. FILE gets a line for every row: the measured and the
predicted time, the error, and whether the row's group was used for fitting (see fit_device.py), or
why it is not predicted. The sha256 of the device files must be those stated in docs/predictions.md,
since they were frozen before these predictions were printed; --hashes prints that table. The
printed summary has rows used for fitting apart from the others.
"""

import argparse
import csv
import hashlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.fit_device import is_fitted  # noqa: E402
from benchmarks.planning.published_rows import (  # noqa: E402
    HOST_SECONDS,
    Run,
    mfu_of,
    predicted,
    read_runs,
)
from forecast.device_file import FOLDER, read_device  # noqa: E402

DOCUMENT = ROOT / "docs" / "predictions.md"
HASH = re.compile(r"^\| `([\w./]+\.json)` \| `([0-9a-f]{64})` \|$", re.MULTILINE)
COLUMNS = ("row", "source", "group", "device", "measured_s", "predicted_s", "error", "mfu", "state")


class Result(NamedTuple):
    """A row with its prediction. mfu: of the measured run, as a share of the bfloat16 peak."""

    run: Run
    predicted: float
    mfu: float

    @property
    def error(self) -> float:
        return self.predicted / self.run.seconds - 1


def stated_hashes() -> dict[str, str]:
    """Return {file in the repository: sha256} as stated in the document."""
    return dict(HASH.findall(DOCUMENT.read_text(encoding="utf-8")))


def frozen_files() -> dict[str, str]:
    """Return {file in the repository: sha256} of the files with the numbers of predictions."""
    files = [*sorted(FOLDER.glob("*.json")), HOST_SECONDS]
    return {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def told(name: str, results: Sequence[Result]) -> str:
    """Return a line of the summary."""
    if not results:
        return f"{name:46} no rows"
    errors = [abs(result.error) for result in results]
    worst = max(results, key=lambda result: abs(result.error))
    within = sum(error <= 0.15 for error in errors) / len(errors)
    return (
        f"{name:46} {len(results):5} rows  median {statistics.median(errors):6.1%}  mean "
        f"{statistics.fmean(errors):6.1%}  within 15 % {within:4.0%}  worst {worst.error:+.0%} "
        f"({worst.run.name})"
    )


def _between(low: float, high: float) -> Callable[[Result], bool]:
    return lambda r: r.run.source == "ultrascale" and low <= r.mfu < high


def summary(results: Sequence[Result]) -> list[str]:
    """Return the printed lines: by source, by device, by measured MFU, and all."""
    parts: list[tuple[str, Callable[[Result], bool]]] = []
    for source in dict.fromkeys(result.run.source for result in results):
        parts.append((source, lambda result, source=source: result.run.source == source))
    for device in sorted({result.run.device for result in results}):
        parts.append((device, lambda result, device=device: result.run.device == device))
    for low, high in ((0.2, 1.0), (0.05, 0.2), (0.0, 0.05)):
        parts.append((f"ultrascale, MFU {low:.0%} to {high:.0%}", _between(low, high)))
    lines = []
    for fitted in (False, True):
        chosen = [result for result in results if is_fitted(result.run.group) == fitted]
        lines.append("fitted on:" if fitted else "never fitted on:")
        lines += [told(f"  {name}", [r for r in chosen if test(r)]) for name, test in parts]
        lines.append(told("  all", chosen))
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="folder of published runs")
    parser.add_argument("--out", type=Path, help="CSV that gets every row's error")
    parser.add_argument("--hashes", action="store_true", help="print the files' sha256")
    args = parser.parse_args(argv)
    if args.hashes:
        print("\n".join(f"| `{name}` | `{sha256}` |" for name, sha256 in frozen_files().items()))
        return 0
    if args.runs is None or args.out is None:
        parser.error("--runs and --out are needed, or --hashes")
    if frozen_files() != stated_hashes():
        print(f"{DOCUMENT.name} states the sha256 of other device files", file=sys.stderr)
        return 1
    runs, left = read_runs(args.runs)
    devices = {run.device: read_device(run.device) for run in runs}
    hosts = json.loads(HOST_SECONDS.read_text())
    results = [
        Result(run, predicted(run, devices[run.device], hosts[run.device]), mfu_of(run))
        for run in runs
    ]
    with args.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for result in results:
            run, state = result.run, "fitted on" if is_fitted(result.run.group) else "held out"
            table.writerow(
                (run.name, run.source, run.group, run.device, f"{run.seconds:.6g}",
                 f"{result.predicted:.6g}", f"{result.error:+.4f}", f"{result.mfu:.4f}", state)
            )  # fmt: skip
        for row in left:
            table.writerow((row.name, "", "", "", "", "", "", "", row.why))
    print("\n".join(summary(results)))
    print(f"{len(left)} rows are not predicted; {args.out} has the reasons and all errors")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
