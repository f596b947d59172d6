#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure a restart by torchrun --max-restarts: from the kill of a rank to the next new step.

    python benchmarks/bench_restart.py [--kills 5] [FLAG...]

Trains on two ranks. A rank is killed with -9 repeatedly, each time 2 to 4 s after the run has
recovered. Printed are medians of the total time and of its parts:

    stop       from the kill until all ranks are gone; the other rank prints why it ends
    launch     until torchrun has started the new ranks
    start      until they have loaded the checkpoint: imports, flags, data, meeting, model, load
    steps      until the first step that was not made before; lost steps are repeated

benchmarks/bench_start.py breaks down `start`. FLAGs are the trainer's; they replace those of the
small model.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--mock-data --vocab-size 4096 --num-layers 4 --hidden-size 192 --num-attention-heads 6 "
    "--seq-length 256 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --device cpu "
    "--use-distributed-optimizer --log-interval 1 --save-interval 20 --keep-last-k 2"
).split()
PARTS = ("stop", "launch", "start", "steps")


class Run:
    """The trainer under torchrun, in a folder."""

    def __init__(self, folder: Path, flags: list[str], kills: int) -> None:
        self.log, self.out = folder / "log.jsonl", folder / "out"
        command = ["tools/torchrun.py", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", str(kills), "pretrain_llama.py", *flags]
        command += ["--train-iters", "1000000", "--log-json", str(self.log)]
        command += ["--save", str(folder / "saved"), "--load", str(folder / "saved")]
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, stdout=out, stderr=out
            )

    def until(self, done: Callable[[], bool]) -> float:
        """Wait until `done()` is true; return the time. Raises SystemExit if torchrun ends."""
        while not done():
            if self.process.poll() is not None:
                raise SystemExit(f"torchrun ended:\n{self.out.read_text()[-4000:]}")
            time.sleep(0.005)
        return time.monotonic()

    def ranks(self) -> set[int]:
        """Return the process ids of the ranks that have not ended."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return {pid for pid in map(int, path.read_text().split()) if lives(pid)}

    def step(self) -> int:
        """Return the last iteration in the log."""
        rows = self.log.read_bytes()[-2000:].split(b"\n")[:-1] if self.log.exists() else []
        steps = [row for row in rows if b'"loss"' in row]
        return int(steps[-1].partition(b'"iteration":')[2].partition(b",")[0]) if steps else 0

    def loads(self) -> int:
        """Return the number of times that a checkpoint was loaded."""
        return self.out.read_text().count(": at iteration ")


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def restart(run: Run, victim: Callable[[list[int]], int]) -> tuple[list[float], int]:
    """Kill a rank; return the seconds of each part, and the number of repeated steps."""
    old, loads, step = run.ranks(), run.loads(), run.step()
    os.kill(victim(sorted(old)), signal.SIGKILL)
    times = [time.monotonic(), run.until(lambda: not run.ranks() & old)]
    times.append(run.until(lambda: len(run.ranks() - old) == len(old)))
    times.append(run.until(lambda: run.loads() > loads))
    begun = int(run.out.read_text().rpartition(": at iteration ")[2].partition(",")[0])
    times.append(run.until(lambda: run.step() > step))
    return [b - a for a, b in zip(times, times[1:], strict=False)], step - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5)
    args, more = parser.parse_known_args()
    draw, found = random.Random(0), list[tuple[list[float], int]]()
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), more or MODEL, args.kills)
        try:
            run.until(lambda: any(Path(name).glob("saved/step_????????")))
            for _ in range(args.kills):
                time.sleep(2.0 + 2.0 * draw.random())
                found.append(restart(run, draw.choice))
        finally:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait()
    totals = [sum(parts) for parts, _ in found]
    columns = zip(PARTS, zip(*(parts for parts, _ in found), strict=True), strict=True)
    print(f"{args.kills} kills: {statistics.median(totals):.1f} s to the next new step "
          f"({min(totals):.1f} to {max(totals):.1f})")  # fmt: skip
    print(", ".join(f"{part} {statistics.median(seconds):.1f}" for part, seconds in columns)
          + f"; steps made again: {statistics.median(again for _, again in found):g}")  # fmt: skip


if __name__ == "__main__":
    main()
