#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure a restart by tools/supervise.py, and what copies in memory cost a step.

    python benchmarks/bench_supervise.py [--kills 5] [--steps 200] [--every 5 20 100] [FLAG...]

Trains on two ranks under the supervisor. First a rank is killed with -9 again and again, once with
copies in memory and once with checkpoints on disk alone; printed are the times to repair, as the
supervisor logs them. Then runs of the same steps, with a copy every so many steps and without any,
in turn, twice each: the ratio of the times in which the steps were made. More flags are the
trainer's, in place of the small model's.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--mock-data --vocab-size 4096 --num-layers 4 --hidden-size 192 --num-attention-heads 6 "
    "--seq-length 256 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --device cpu "
    "--use-distributed-optimizer --log-interval 1000000"
).split()


class Run:
    """The trainer under a supervisor, in a folder of its own."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        folder.mkdir()
        self.log = folder / "supervise.jsonl"
        words = ["--nproc-per-node", "2", "--log-json", str(self.log), "pretrain_llama.py"]
        words += [*flags, "--save", str(folder / "saved"), "--load", str(folder / "saved")]
        with open(folder / "out", "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "tools/supervise.py", *words], cwd=ROOT, stdout=out, stderr=out
            )

    def rows(self, event: str) -> list[dict[str, Any]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [row for line in text.splitlines() if (row := json.loads(line))["event"] == event]

    def ranks(self) -> list[int]:
        """Return the ranks' process ids."""
        found = [self.process.pid]
        for _ in range(2):
            paths = [Path(f"/proc/{pid}/task/{pid}/children") for pid in found]
            found = [int(pid) for path in paths for pid in path.read_text().split()]
        return sorted(found)

    def end(self) -> dict[str, Any]:
        """Wait for the end; return what the supervisor logs of it."""
        code = self.process.wait()
        assert code in (0, 75), f"exit code {code}: {self.log.parent / 'out'}"
        return self.rows("end")[0]


def repair(folder: Path, flags: list[str], kills: int) -> Run:
    """Kill a rank so many times, each time 2 to 4 s after the run was back; stop the run."""
    run, draw = Run(folder, [*flags, "--train-iters", "1000000"]), random.Random(0)
    memory = f"weft-{os.getuid()}-{run.process.pid}-*/memory/step_*"
    while not [*(folder / "saved").glob("step_????????"), *Path("/dev/shm").glob(memory)]:
        assert run.process.poll() is None, folder / "out"
        time.sleep(0.1)
    for kill in range(kills):
        time.sleep(2.0 + 2.0 * draw.random())
        os.kill(draw.choice(run.ranks()), signal.SIGKILL)
        while len(run.rows("back")) <= kill:
            assert run.process.poll() is None, folder / "out"
            time.sleep(0.1)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, nargs="*", default=[5, 20, 100])
    args, more = parser.parse_known_args()
    model = more or MODEL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, flags in {
            "memory, a copy every 5 steps": ["--peer-checkpoint", "5"],
            "disk, a checkpoint every 20 steps": ["--save-interval", "20", "--keep-last-k", "2"],
        }.items():
            if args.kills:
                rows = repair(folder / title.split(",")[0], [*model, *flags], args.kills).rows(
                    "back"
                )
                times = sorted(row["mttr_seconds"] for row in rows)
                assert {row["source"] for row in rows} <= {title.split(",")[0]}, rows
                parts = [
                    statistics.median(row[f"{p}_seconds"] for row in rows)
                    for p in ("stop", "start")
                ]
                print(
                    f"{title}: {args.kills} kills, time to repair {statistics.median(times):.1f} s "
                    f"(median; {times[0]:.1f} to {times[-1]:.1f}), ranks gone {parts[0]:.1f} s, "
                    f"training again {parts[1]:.1f} s later, "
                    f"{sum(row['steps_lost'] for row in rows)} steps lost",
                    flush=True,
                )
        took: dict[int, list[float]] = {}
        for turn in range(2):
            for every in [0, *args.every]:
                flags = ["--peer-checkpoint", str(every)] if every else []
                steps = ["--train-iters", str(args.steps)]
                end = Run(folder / f"{turn}.{every}", [*model, *flags, *steps]).end()
                took.setdefault(every, []).append(end["goodput"] * end["wall_seconds"] / args.steps)
        base = min(took.pop(0))
        print(f"a step without copies: {1000 * base:.1f} ms")
        for every, seconds in took.items():
            print(f"a copy every {every} steps: {min(seconds) / base:.3f} of that")


if __name__ == "__main__":
    main()
