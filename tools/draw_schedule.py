# SPDX-License-Identifier: Apache-2.0
"""Draw the simulation of a pipeline schedule, and print its numbers.

    python tools/draw_schedule.py --schedule zb-v -p 4 -m 8 --out zb-v.svg
    python tools/draw_schedule.py --all docs/schedules
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from mpu.pipeline.schedules import CHUNKS, NAMES, Schedule, build, table
from mpu.pipeline.simulate import Costs, Simulation, simulate
from tools.command_line import Parser, error_line
from tools.pictures.schedule import caption, draw, heading
from tools.pictures.timeline import usual_peak
from training.run.text import aligned


def simulated(schedule: Schedule, costs: Sequence[float], send: float) -> Simulation:
    """Simulate a schedule. costs: of F, B and W of all layers of a rank for one micro-batch."""
    f, b, w = ([cost / schedule.chunks] * schedule.stages for cost in costs)
    return simulate(schedule, Costs(f, b, w, send))


def per_rank(said: Simulation) -> str:
    """Return a table of each rank's numbers."""
    head = ("rank", "busy", "idle", "held for B", "held for W", "peak")
    counts = zip(said.busy, said.peak_for_b, said.peak_for_w, said.peak, strict=True)
    lines = [
        [str(rank), f"{busy:.4g}", f"{1 - busy / said.step:.1%}", *(f"{n:g}" for n in held)]
        for rank, (busy, *held) in enumerate(counts)
    ]
    return "\n".join(aligned([head, *lines]))


DRAWN = Path("runs/schedules")  # the folder of a picture without --out


def axis_of(costs: Sequence[float]) -> str:
    """Return the unit of simulated times, in words."""
    return "1 is a forward of one micro-batch" if costs[0] == 1 else "in the units of --costs"


def draw_all(folder: Path, p: int, m: int, v: int, costs: Sequence[float], send: float) -> str:
    """Draw every schedule into a folder, all at one scale; return a table of their numbers."""
    drawn = []
    for name in NAMES:
        schedule = build(name, p, m, v if name == "interleaved" else CHUNKS.get(name, 1))
        drawn.append((schedule, simulated(schedule, costs, send)))
    until = max(said.step for _, said in drawn)
    lines = []
    for schedule, said in drawn:
        picture = folder / f"{schedule.name}.svg"
        draw(said, schedule, picture, axis=axis_of(costs), until=until)
        step, bubble, peak = said.step, said.bubble, max(said.peak)
        times = [f"{step:.4g}", f"{bubble:.4g}", f"{bubble / step:.1%}"]
        lines.append([schedule.name, *times, f"{peak:g}", f"{peak / usual_peak(schedule):.0%}"])
    head = ["schedule", "step", "bubble", "share", "peak", "of 1F1B's"]
    return "\n".join(aligned([head, *lines]))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags, print the numbers, draw the picture; return the exit status."""
    args = _flags(argv)
    try:
        if args.all:
            print(draw_all(args.all, args.p, args.m, args.v or 2, args.costs, args.send))
            return 0
        v = args.v or CHUNKS.get(args.schedule, 1)
        schedule = build(args.schedule, args.p, args.m, v, args.group)
        said = simulated(schedule, args.costs, args.send)
        out = args.out
        if out is None and not args.table:
            out = DRAWN / f"{schedule.name}-p{args.p}-m{args.m}.svg"
        if out:
            draw(said, schedule, out, axis=axis_of(args.costs))
        print(heading(schedule), caption(said), per_rank(said), sep="\n")
        if out:
            print(f"drawn: {out}")
        if args.table:
            print(table(schedule))
    except (ValueError, OSError) as error:
        output = f"--all {args.all}" if args.all else f"--out {args.out}" if args.out else ""
        print(error_line("draw_schedule.py", error, output), file=sys.stderr)
        return 2
    return 0


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--schedule", help=f"one of {', '.join(NAMES)}")
    what.add_argument("--all", type=Path, metavar="DIR", help="draw each of them into DIR")
    parser.add_argument("-p", type=int, default=4, help="pipeline size (default: 4)")
    parser.add_argument("-m", type=int, default=8, help="micro-batches (default: 8)")
    parser.add_argument(
        "-v", type=int, help="virtual stages per rank (default: 2 if the schedule has them)"
    )
    parser.add_argument("--group", type=int, help="micro-batch group size of interleaved (p)")
    parser.add_argument(
        "--costs",
        type=_costs,
        default=(1.0, 1.0, 1.0),
        metavar="F,B,W",
        help="of one micro-batch in all layers of a rank, divided among its chunks; default: 1,1,1",
    )
    parser.add_argument("--send", type=float, default=0.0, help="cost of one message (default: 0)")
    parser.add_argument("--out", type=Path, help=".svg or .png; default: in runs/schedules")
    parser.add_argument("--table", action="store_true", help="print the schedule as a table too")
    args = parser.parse_args(argv)
    if args.send < 0:
        parser.error(f"--send {args.send} must be at least 0")
    if args.all and (args.out or args.table or args.group):
        parser.error("--all cannot be combined with --out, --table or --group")
    return args


def _costs(text: str) -> tuple[float, ...]:
    """Read "1,1,1"."""
    try:
        f, b, w = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not three numbers F,B,W") from None
    if not all(0 < cost < math.inf for cost in (f, b, w)):
        raise argparse.ArgumentTypeError(f"{text}: every cost must be above 0")
    return f, b, w


if __name__ == "__main__":
    sys.exit(main())
