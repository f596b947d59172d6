# SPDX-License-Identifier: Apache-2.0
"""Run every test in its long form, part by part, and print how each part went: `make prove`.

    python tests/prove.py              all parts, one after another
    python tests/prove.py kills model  these
    python tests/prove.py --kept       print how each part last went, and at which commit

Exits 1 if a part fails, after all of them have run. tests/proved.csv keeps each part's last result
with its commit, so that parts which ran on several days make one whole.
"""

import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "tests" / "proved.csv"
COLUMNS = ("part", "tests", "failed", "skipped", "seconds", "commit", "date", "torch")
GPU = "tests/gpu"  # `make gpu-check` runs it
# A test file belongs to the part that names it, or else to the one that names the nearest folder.
PARTS: dict[str, tuple[str, ...]] = {
    "house": ("tests",),
    "mpu": ("tests/mpu",),
    "training": ("tests/training",),
    "forecast": ("tests/forecast",),
    "planner": ("tests/forecast/planner",),
    "rehearsal": ("tests/forecast/rehearsal",),
    "checkpoint": ("tests/training/checkpoint",),
    "tools": ("tests/tools", "tests/benchmarks"),
    "model": ("tests/model",),
    "zero": (
        "tests/mpu/zero/test_order.py",
        "tests/forecast/test_recording.py",
        "tests/mpu/zero/test_waits.py",
    ),
    "runs": (
        "tests/test_pipeline_run.py",
        "tests/test_zero_run.py",
        "tests/test_sample_ledger.py",
    ),
    "failures": (
        "tests/faults/test_failures.py",
        "tests/faults/test_pipeline_failures.py",
        "tests/faults/test_zero_failures.py",
        "tests/faults/test_torchrun.py",
        "tests/faults/test_restarts.py",
        "tests/faults/test_network.py",
    ),
    "hangs": ("tests/faults/test_hangs.py", "tests/faults/test_slow_ranks.py"),
    "memory": ("tests/faults/test_memory_that_lasts.py",),
    "kills": ("tests/faults/test_kills.py",),
    "chaos": ("tests/chaos",),
}


@dataclass
class Outcome:
    """How a part went. counts: {"tests", "failures", "errors", "skipped"} of pytest."""

    part: str
    counts: dict[str, int]
    code: int
    seconds: float

    def __str__(self) -> str:
        bad = self.counts["failures"] + self.counts["errors"]
        result = "passed" if self.code == 0 else f"{bad} FAILED" if bad else f"EXIT {self.code}"
        if self.counts["skipped"]:
            result += f", {self.counts['skipped']} skipped"
        return f"{self.part:<15} {self.counts['tests']:>6,} {result:<24} {self.seconds:>8,.0f}"


def part_of(name: str, parts: Mapping[str, Sequence[str]] = PARTS) -> str:
    """Return the part of a test file, by the longest path that holds it. Raises KeyError."""
    fits = [
        (len(path), part)
        for part, paths in parts.items()
        for path in paths
        if name == path or name.startswith(path + "/")
    ]
    if not fits:
        raise KeyError(name)
    return max(fits)[1]


def files_of(part: str) -> list[str]:
    """List the test files of a part."""
    names = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py"))
    return [n for n in names if not n.startswith(GPU + "/") and part_of(n) == part]


def run(part: str, files: Sequence[str]) -> Outcome:
    """Run a part's files in a pytest of its own, in two processes: the one that has no test left
    takes some of the other's. A part without a test fails.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "pytest", "-q", "-rs", "-m", "not gpu", f"--junitxml={report}", *files]
        words += ["-n", "2", "--dist", "worksteal"]
        code = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
        keys = ("tests", "failures", "errors", "skipped")
        counts = dict.fromkeys(keys, 0)
        if report.exists():
            for suite in ElementTree.parse(report).getroot().iter("testsuite"):
                counts = {key: counts[key] + int(suite.get(key, 0)) for key in keys}
    return Outcome(part, counts, code, time.monotonic() - began)


def table(outcomes: Sequence[Outcome]) -> str:
    """Write one line a part, and all of them together."""
    total = f"{sum(o.counts['tests'] for o in outcomes):>6,}"
    bad = sum(o.code != 0 for o in outcomes)
    result = f"{bad} of {len(outcomes)} parts FAILED" if bad else "passed"
    seconds = sum(o.seconds for o in outcomes)
    head = f"{'part':<15} {'tests':>6} {'result':<24} {'seconds':>8}"
    last = f"{'all':<15} {total} {result:<24} {seconds:>8,.0f}"
    return "\n".join([head, *map(str, outcomes), last])


def commit() -> str:
    """Return the commit that is checked out, with a "+" where files differ from it."""
    words = ("rev-parse", "--short=8", "HEAD"), ("status", "--porcelain", "-uno")
    head, changed = (
        subprocess.run(["git", *each], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for each in words
    )
    return head + "+" * bool(changed)


def kept() -> dict[str, dict[str, str]]:
    """Return the last result of each part that has one, by COLUMNS."""
    if not KEPT.exists():
        return {}
    with open(KEPT, newline="") as file:
        return {row["part"]: row for row in csv.DictReader(file)}


def keep(outcome: Outcome, of: str) -> None:
    """Write a part's result, of the commit `of`, in place of an earlier one."""
    counts, rows = outcome.counts, kept()
    values = (
        outcome.part, counts["tests"],
        max(counts["failures"] + counts["errors"], int(outcome.code != 0)), counts["skipped"],
        round(outcome.seconds), of, date.today().isoformat(), version("torch"),
    )  # fmt: skip
    rows[outcome.part] = dict(zip(COLUMNS, map(str, values), strict=True))
    with open(KEPT, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[part] for part in PARTS if part in rows)


def kept_table() -> str:
    """Write one line a part, how it last went and at which commit, or that it has not run; and
    their sums, with the commit if it is one.
    """
    rows, missing = kept(), dict.fromkeys(COLUMNS, "")
    table = [{name: name for name in COLUMNS}]
    table += [rows.get(part, {**missing, "part": part, "tests": "never"}) for part in PARTS]
    sums = {
        name: str(sum(int(row[name]) for row in rows.values()))
        for name in ("tests", "failed", "skipped", "seconds")
    }
    commits = {row["commit"] for row in rows.values()}
    one = commits.pop() if len(commits) == 1 else f"{len(commits)} commits"
    table.append({**missing, **sums, "part": "all", "commit": one})
    widths = {name: max(len(row[name]) for row in table) for name in COLUMNS}
    lines = ("  ".join(row[name].ljust(widths[name]) for name in COLUMNS) for row in table)
    return "\n".join(map(str.rstrip, lines))


def main(argv: Sequence[str]) -> int:
    """Run the parts that are named, or all; return 1 if one fails, 2 for a name of no part."""
    if argv == ["--kept"]:
        print(kept_table())
        return 0
    for part in argv:
        if part not in PARTS:
            print(f"make prove: PART {part} is none of {', '.join(PARTS)}", file=sys.stderr)
            return 2
    outcomes = []
    try:
        for part in argv or PARTS:
            print(f"make prove: {part}", flush=True)
            of = commit()  # before it runs, which may take an hour
            outcomes.append(run(part, files_of(part)))
            keep(outcomes[-1], of)
            print(outcomes[-1], flush=True)
    finally:  # also after Ctrl-C
        print(f"\n{table(outcomes)}", flush=True)
    return int(any(outcome.code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
