# SPDX-License-Identifier: Apache-2.0
"""Draw a pipeline schedule, as simulated or as it ran, and print its numbers.

    python tools/draw_schedule.py --schedule zb-v -p 4 -m 8 --out zb-v.svg
    python tools/draw_schedule.py --all docs/schedules
    python tools/draw_schedule.py --profile runs/mine/profile --out measured.png

--profile takes the folder where a run with --profile wrote its pipeline_rank<r>.json files.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from mpu.pipeline.schedules import CHUNKS, NAMES, Action, Schedule, build, table
from mpu.pipeline.simulate import Costs, Span, Timeline, simulate, validate
from tools.command_line import Parser, error_line
from tools.pictures.schedule import caption, draw, heading
from tools.pictures.timeline import Summary, rows, summary, usual_peak
from training.files.untrusted import read_json
from training.run.text import aligned

LARGEST = 1 << 30  # bytes of one rank's record


def simulated(schedule: Schedule, costs: Sequence[float], send: float) -> Timeline:
    """Simulate a schedule. costs: of F, B and W of all of a rank's layers on one micro-batch."""
    f, b, w = ([cost / schedule.chunks] * schedule.stages for cost in costs)
    return simulate(schedule, Costs(f, b, w, send)).timeline


def measured(folder: Path, iteration: int | None = None) -> tuple[Schedule, Timeline, int]:
    """Return a run's schedule, its timeline in one step in ms, and the iteration of that step.

    iteration: which step; None takes the one of median length. Raises ValueError if a file is
    missing or damaged, or if the files are of different runs.
    """
    first = _read(folder / "pipeline_rank0.json")
    records = [first]
    records += [_read(folder / f"pipeline_rank{rank}.json") for rank in range(1, first["pp_size"])]
    for rank, own in enumerate(records):
        for key in ("schedule", "chunks", "v_shape", "split", "pp_size"):
            if own[key] != first[key]:
                raise ValueError(
                    f"{folder}: the files are of different runs: {key} is {first[key]} on rank 0 "
                    f"and {own[key]} on rank {rank}"
                )
        if own["pp_rank"] != rank:
            raise ValueError(
                f"{folder}/pipeline_rank{rank}.json: was written by rank {own['pp_rank']}"
            )
        if list(own["steps"]) != list(first["steps"]):
            raise ValueError(
                f"{folder}: the files are of different runs: rank 0 has the steps "
                f"{_list(first['steps'])} and rank {rank} {_list(own['steps'])}"
            )
    steps = {i: Timeline(tuple(own["steps"][i] for own in records)) for i in first["steps"]}
    if iteration is None:
        lengths = {i: _length(step) for i, step in steps.items()}
        middle = statistics.median_low(lengths.values())
        iteration = next(i for i, length in lengths.items() if length == middle)
    if iteration not in steps:
        raise ValueError(f"{folder}: holds the steps {_list(list(steps))}, not {iteration}")
    timeline = steps[iteration]
    orders = tuple(tuple(_actions(spans)) for spans in timeline.ranks)
    count = 1 + max(action.micro_batch for order in orders for action in order)
    settings = {key: first[key] for key in ("chunks", "split", "v_shape")}
    schedule = Schedule(first["schedule"], orders, count, **settings)
    try:
        validate(schedule)
    except ValueError as error:
        raise ValueError(f"{folder}: step {iteration} is incomplete: {error}") from None
    return schedule, _from_zero(timeline), iteration


def _read(path: Path) -> dict[str, Any]:
    """Read the record of one rank, its steps as {iteration: spans}. Raises ValueError."""
    try:
        record = read_json(path, LARGEST)
        record["steps"] = {
            int(step["iteration"]): tuple(
                Span(Action(str(kind), int(chunk), int(i)), float(begin), float(end))
                for kind, chunk, i, begin, end in step["spans"]
            )
            for step in record["steps"]
        }
        actions = [span.action for spans in record["steps"].values() for span in spans]
        most = max(map(len, record["steps"].values()))  # no count is above that of the actions
        sizes = [record[key] for key in ("pp_size", "chunks")]
        sound = all(isinstance(size, int) and size > 0 for size in sizes)
        sound = sound and record["chunks"] <= most and max(a.micro_batch for a in actions) < most
        known = {"schedule", "pp_rank", "v_shape", "split"} <= record.keys()
        known = known and {action.kind for action in actions} <= {"F", "B", "W", "BW"}
        if not (sound and known and all(record["steps"].values())):
            raise KeyError
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError(f"{path}: not what a training run with --profile writes") from None
    if record["schedule"] not in NAMES:
        raise ValueError(f"{path}: schedule {record['schedule']!r} is none of {', '.join(NAMES)}")
    return record


def _actions(spans: Sequence[Span]) -> list[Action]:
    """Return the actions of spans; a BW is a B and a W."""
    return [action._replace(kind=kind) for action, _, _ in spans for kind in action.kind]


def _length(timeline: Timeline) -> float:
    """Return the time from the first begin to the last end, in s."""
    spans = [span for rank in timeline.ranks for span in rank]
    return max(span.end for span in spans) - min(span.begin for span in spans)


def _from_zero(timeline: Timeline) -> Timeline:
    """Return the timeline in ms from its first begin; it came in seconds."""
    zero = min(span.begin for spans in timeline.ranks for span in spans)
    return Timeline(
        tuple(
            tuple(Span(a, 1e3 * (begin - zero), 1e3 * (end - zero)) for a, begin, end in spans)
            for spans in timeline.ranks
        )
    )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def per_rank(numbers: Summary) -> str:
    """Return a table of each rank's numbers."""
    head = ("rank", "busy", "idle", "held for B", "held for W", "peak")
    counts = (numbers.peak_for_b, numbers.peak_for_w, numbers.peak)
    lines = []
    both = zip(numbers.busy, numbers.idle, *counts, strict=True)
    for rank, (busy, idle, *activations) in enumerate(both):
        lines.append([str(rank), f"{busy:.4g}", f"{idle:.1%}", *map(str, activations)])
    return "\n".join(aligned([head, *lines]))


DRAWN = Path("runs/schedules")  # where a picture goes that nobody names


def axis_of(costs: Sequence[float]) -> str:
    """Return the unit of a simulated time: what F, B and W of a micro-batch cost is in it."""
    return "1 is a forward of one micro-batch" if costs[0] == 1 else "in the units of --costs"


def draw_all(folder: Path, p: int, m: int, v: int, costs: Sequence[float], send: float) -> str:
    """Draw every schedule into a folder, all to one scale; return a table of their numbers."""
    drawn = []
    for name in NAMES:
        schedule = build(name, p, m, v if name == "interleaved" else CHUNKS.get(name, 1))
        timeline = simulated(schedule, costs, send)
        drawn.append((schedule, timeline, summary(rows(timeline, schedule))))
    until = max(numbers.step for _, _, numbers in drawn)
    lines = []
    for schedule, timeline, numbers in drawn:
        picture = folder / f"{schedule.name}.svg"
        draw(timeline, schedule, picture, axis=axis_of(costs), until=until)
        step, bubble, peak = numbers.step, numbers.bubble, max(numbers.peak)
        times = [f"{step:.4g}", f"{bubble:.4g}", f"{bubble / step:.1%}"]
        lines.append([schedule.name, *times, str(peak), f"{peak / usual_peak(schedule):.0%}"])
    head = ["schedule", "step", "bubble", "share", "peak", "of 1F1B's"]
    return "\n".join(aligned([head, *lines]))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags, print the numbers, draw the picture; return the exit status."""
    args = _flags(argv)
    try:
        if args.all:
            print(draw_all(args.all, args.p, args.m, args.v or 2, args.costs, args.send))
            return 0
        if args.profile:
            schedule, timeline, step = measured(args.profile, args.iteration)
            title, unit, axis = f"{heading(schedule)}, measured in step {step}", "ms", "ms"
        else:
            v = args.v or CHUNKS.get(args.schedule, 1)
            schedule = build(args.schedule, args.p, args.m, v, args.group)
            timeline = simulated(schedule, args.costs, args.send)
            title, unit, axis = heading(schedule), "", axis_of(args.costs)
        numbers = summary(rows(timeline, schedule))
        out = args.out
        if out is None and not args.table:
            out = DRAWN / f"{schedule.name}-p{args.p}-m{args.m}.svg"
            out = args.profile / "schedule.svg" if args.profile else out
            out.parent.mkdir(parents=True, exist_ok=True)
        if out:
            draw(timeline, schedule, out, title=title, unit=unit, axis=axis)
        print(title, caption(numbers, unit), per_rank(numbers), sep="\n")
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
    parser = Parser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--schedule", help=f"one of {', '.join(NAMES)}")
    what.add_argument("--all", type=Path, metavar="DIR", help="draw each of them into DIR")
    what.add_argument(
        "--profile", type=Path, metavar="DIR", help="draw a run measured by --profile"
    )
    parser.add_argument("-p", type=int, default=4, help="pipeline size (4)")
    parser.add_argument("-m", type=int, default=8, help="micro-batches (8)")
    parser.add_argument(
        "-v", type=int, help="virtual stages a rank (2 where it may be more than 1)"
    )
    parser.add_argument("--group", type=int, help="micro-batch group size of interleaved (p)")
    parser.add_argument(
        "--costs",
        type=_costs,
        default=(1.0, 1.0, 1.0),
        metavar="F,B,W",
        help="of one micro-batch in all layers of a rank (1,1,1); a chunk takes its share",
    )
    parser.add_argument("--send", type=float, default=0.0, help="cost of one message (0)")
    parser.add_argument("--iteration", type=int, help="step of --profile (that of median length)")
    parser.add_argument(
        "--out", type=Path, help=".svg or .png; default: one in runs/schedules, or in --profile"
    )
    parser.add_argument("--table", action="store_true", help="print the schedule as a table too")
    args = parser.parse_args(argv)
    if args.send < 0:
        parser.error(f"--send {args.send}: a message takes no less than 0")
    if args.iteration is not None and not args.profile:
        parser.error("--iteration chooses a step of --profile")
    if args.all and (args.out or args.table or args.group):
        parser.error("--all takes no --out, --table or --group")
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
