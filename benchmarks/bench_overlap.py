#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the share of gradient communication that is hidden by computation, over a slow link.

    sudo python benchmarks/bench_overlap.py [--link 1gbit] [--levels 0] [--buckets 4000000 1000000]

Two data-parallel ranks of one thread run in two network namespaces, joined by a link of that rate
(Linux, root, iproute2). The run is in fp32, with one micro-batch of --micro-batch sequences per
rank.

    hidden = 1 - (overlapped - perfect) / communication
    overlapped      a step with --overlap-grad-reduce
    at the end      a step without it
    perfect         the overlapped step, with the collectives replaced by local copies (perfect.py)
    communication   the same buckets' collectives back to back, while nothing else runs

Figures are seconds: medians over the timed steps of alternating launches, with the minimum in
brackets. The hidden share is printed for both, since noise adds more to the longer times. In
`perfect` the ranks still agree on the loss and the norm, so the faster rank waits for the slower
one there, too. From level 1 on, communication includes the gather of updated weights, which
overlaps the next forward (--overlap-param-gather).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_pipeline import Link  # noqa: E402
from benchmarks.bench_step import SIZES, model_flags  # noqa: E402
from mpu.comm import collectives  # noqa: E402
from mpu.grid import Launch  # noqa: E402
from pretrain_llama import Run, build, make_grid, prepare  # noqa: E402
from training.faults.monitor import FailureMonitor  # noqa: E402
from training.flags.parse import parse  # noqa: E402
from training.run.rendezvous import meet  # noqa: E402
from training.run.start import connect  # noqa: E402

TRAINER = ROOT / "pretrain_llama.py"
PERFECT = ROOT / "benchmarks" / "perfect.py"
WARM = {"tiny": 3, "small": 1}  # steps before the timed ones
SIDES = ("overlapped", "at the end", "perfect", "communication")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="1gbit", metavar="RATE", help="as tc writes it (1gbit)")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences a rank (2)")
    parser.add_argument("--levels", nargs="+", type=int, default=[0], choices=range(3))
    parser.add_argument("--buckets", nargs="+", type=int, default=[4_000_000], metavar="ELEMENTS")
    parser.add_argument("--launches", type=int, default=3, help="of each, taken in turn")
    parser.add_argument("--steps", type=int, default=0, help="timed (0: 10 tiny, 2 small)")
    parser.add_argument("--communicate", type=Path, help=argparse.SUPPRESS)  # a rank of that side
    args, rest = parser.parse_known_args()
    if args.communicate:
        return communicate(args.communicate, args.steps, rest)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    args.steps = args.steps or (10 if args.size == "tiny" else 2)
    print(f"{args.size}, fp32, dp 2 over a link of {args.link}, {args.micro_batch} sequences a "
          "rank; seconds, medians of alternating launches\n")  # fmt: skip
    print("| level, bucket |", *[f" {side} |" for side in SIDES], " hidden |", sep="")
    print("|---|" + "---|" * (len(SIDES) + 1))
    with Link(args.link, burst="256kb") as link:
        for level in args.levels:
            for bucket in args.buckets:
                found: dict[str, list[float]] = {side: [] for side in SIDES}
                for _ in range(args.launches):
                    for side in SIDES:
                        found[side] += run(link, side, level, bucket, args)
                medians = [statistics.median(found[side]) for side in SIDES]
                least = [min(found[side]) for side in SIDES]
                both = [f"{x:.3f} ({y:.3f})" for x, y in zip(medians, least, strict=True)]
                row = [f"{level}, {bucket * 4 / 1e6:.0f} MB", *both]
                share = f" **{hidden(*medians):.0%}** ({hidden(*least):.0%}) |"
                print("|", *[f" {cell} |" for cell in row], share, sep="", flush=True)


def hidden(overlapped: float, at_the_end: float, perfect: float, communication: float) -> float:
    """Return the share of the communication for which the step does not wait."""
    return 1 - (overlapped - perfect) / communication


def run(link: Link, side: str, level: int, bucket: int, args: argparse.Namespace) -> list[float]:
    """Run one side on both ends of the link; return the timed steps' seconds."""
    warm = WARM[args.size]
    flags = [*model_flags(args.size), "--micro-batch-size", str(args.micro_batch)]
    flags += ["--global-batch-size", str(args.micro_batch * 2), "--zero-stage", str(level)]
    flags += ["--train-iters", str(warm + args.steps), "--ddp-bucket-size", str(bucket)]
    flags += ["--no-shared-memory"]  # both ends of the link are on this host
    if side != "at the end":
        flags += ["--overlap-grad-reduce"] + ["--overlap-param-gather"] * (level > 0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        if side == "communication":
            words = [__file__, "--communicate", str(file), "--steps", str(args.steps)]
            link.run([sys.executable, *words, *flags])
            return json.loads(file.read_text())
        flags += ["--log-json", str(file)]
        program = PERFECT if side == "perfect" else TRAINER
        link.run([sys.executable, str(program), *flags])
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [row["step_seconds"] for row in rows if "step_seconds" in row][warm:]


def communicate(file: Path, steps: int, flags: list[str]) -> None:
    """Run one rank: build the run of the flags, and time only a step's collectives."""
    launch = Launch.from_env()
    config = parse(flags, launch.world)
    grid = make_grid(config, launch)
    config, device, _, _ = prepare(config, grid, False, print)
    wait = timedelta(minutes=5)
    connect(config, grid, device, meet(wait, launch), wait, print)
    trained = build(config, grid, device, FailureMonitor())
    seconds = []
    for _ in range(1 + steps):  # the first one, not timed, connects the ranks and touches memory
        collectives.barrier(grid.world)
        begin = time.perf_counter()
        collectives_of_a_step(trained)
        collectives.barrier(grid.world)
        seconds.append(time.perf_counter() - begin)
    if grid.rank == 0:
        file.write_text(json.dumps(seconds[1:]))
    grid.close()


def collectives_of_a_step(run: Run) -> None:
    """Sum all buckets, without gradients in them, and gather all sharded weights."""
    run.sink.begin_step()
    run.sink.finish_grad_sync()
    run.optimizer.weights_from_masters()
    run.sink.wait_for_weights()


if __name__ == "__main__":
    main()
