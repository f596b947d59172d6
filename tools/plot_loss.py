# SPDX-License-Identifier: Apache-2.0
"""Draw the losses of runs from their --log-json files, as a picture one would put in a README.

    python tools/plot_loss.py runs/quickstart/tp2/log.jsonl --output loss.png \\
        --reference 5.9 "unigram entropy" --title "Llama, 3.4 M parameters, TP 2"
    python tools/plot_loss.py base/log.jsonl wide/log.jsonl --names base wide --axis tokens \\
        --output both.svg

A run has one colour: its training loss is a line, its validation loss the dots on a line. Sets of
--multiple-validation-sets have a curve each, with dots of their own shape. Each curve ends in its
name and its last value, so no legend has to be looked up. The value of the training loss is a mean
over the run's last steps, as many as the label says.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from tools.command_line import Parser, error_line
from tools.pictures.style import PALETTE, QUIET, axes_at, check_name, page
from training.untrusted import parse_json, read_plain

LARGEST = 1 << 30  # bytes of a log
AXES = {"iterations": "iteration", "tokens": "tokens", "time": "hours of training steps"}
VALIDATION = "validation_loss"  # a set's name follows, after "/"
MARKERS = "osD^vP*X"  # of the sets
LABEL_GAP = 13  # points between two labels, at least
Curve = list[tuple[float, float]]


@dataclass
class Run:
    """What a log says: {"loss": {iteration: value}, ...}, and where its iterations lie.

    curves: "loss", "validation_loss", and "validation_loss/NAME" for each of several sets.
    at: {iteration: (tokens consumed, seconds of steps)}.
    """

    curves: dict[str, dict[int, float]]
    at: dict[int, tuple[float, float]]

    def curve(self, name: str, axis: str = "iterations") -> Curve:
        """Return the points of a curve, over --axis."""
        points = sorted(self.curves[name].items())
        if axis == "iterations":
            return [(float(i), value) for i, value in points]
        places = sorted(self.at.items())
        return [(self._place(places, i)[axis == "time"], value) for i, value in points]

    def _place(self, places: list[tuple[int, tuple[float, float]]], i: int) -> tuple[float, float]:
        """Return tokens and hours at an iteration, which may lie between two lines of the log."""
        before, (tokens, seconds) = 0, (0.0, 0.0)
        for end, (more, later) in places:
            if i <= end:
                share = (i - before) / (end - before)
                tokens += share * (more - tokens)
                return tokens, (seconds + share * (later - seconds)) / 3600
            before, tokens, seconds = end, more, later
        return tokens, seconds / 3600


def read_log(path: Path) -> Run:
    """Return the losses of a run as it went.

    Where a resumed run repeats iterations, the later line counts and what it replaces is dropped.
    """
    legs: list[list[_Line]] = [[]]  # a new one where the run went back
    last = trained = 0  # the iterations of the line before, and of this leg's last with a loss
    for number, line in enumerate(read_plain(path, LARGEST).splitlines(), 1):
        try:
            read = _read(parse_json(line, ""))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise ValueError(f"{path}, line {number}: not a line of a --log-json file") from None
        # a line of several steps begins before an evaluation that came in between: that is no
        # resume, but to train twice on one iteration is
        if read.iteration < last or (read.trains and read.first <= trained):
            legs.append([])
            trained = 0
        legs[-1].append(read)
        last, trained = read.iteration, read.iteration if read.trains else trained
    names = {"loss", VALIDATION}.union(*(read.points for leg in legs for read in leg))
    curves: dict[str, dict[int, float]] = {name: {} for name in sorted(names)}
    at: dict[int, tuple[float, float]] = {}
    for leg in legs:
        # an evaluation alone, before a first step or by --skip-train, takes nothing's place
        first = min((read.first for read in leg if read.trains), default=math.inf)
        curves = {n: {i: v for i, v in c.items() if i < first} for n, c in curves.items()}
        at = {i: place for i, place in at.items() if i < first}
        for read in leg:
            for name, points in read.points.items():
                curves[name] |= {i: v for i, v in points.items() if v is not None}
            before = max(at, default=0)
            if read.speed is not None and read.iteration > before:
                rate, step = read.speed
                tokens, seconds = at.get(before, (0.0, 0.0))
                took = (read.iteration - before) * step
                tokens = tokens + took * rate if read.tokens is None else read.tokens
                at[read.iteration] = tokens, seconds + took
    return Run(curves, at)


@dataclass
class _Line:
    """A line of a log: the points of each curve, and how far and how fast the run is.

    speed: (tokens a second, seconds a step), None where the line has no step's time.
    """

    iteration: int
    points: dict[str, dict[int, Any]]
    speed: tuple[float, float] | None
    tokens: float | None
    trains: bool

    @property
    def first(self) -> int:
        """Return the first iteration that the line is about."""
        return min(self.points["loss"])


def _read(record: dict[str, Any]) -> _Line:
    """Return a record's points. Raises ValueError, KeyError, TypeError, AttributeError or
    OverflowError for one that Log did not write.
    """
    iteration = int(record["iteration"])
    names = ["loss", *(n for n in record if n.partition("/")[0] == VALIDATION)]
    points: dict[str, dict[int, Any]] = {n: {iteration: record.get(n)} for n in names}
    points["loss"] |= {int(i): value for i, value in record.get("step_losses") or ()}
    tokens = record.get("consumed_tokens")
    speed = record.get("tokens_per_second") or 0.0, record.get("step_seconds") or 0.0
    values = [v for each in points.values() for v in each.values() if v is not None]
    if not all(type(v) in (int, float) for v in (*values, *speed, tokens or 0)):
        raise ValueError
    timed = speed if "step_seconds" in record else None
    return _Line(iteration, points, timed, tokens, "loss" in record)


def half_window(points: int, share: float = 0.04) -> int:
    """Return how far `smooth` looks to either side: about share / 2 of the points.

    A short curve has at least five to a side, or a quarter of its points.
    """
    return max(round(share * points / 2), min(5, points // 4))


def smooth(curve: Curve, share: float = 0.04) -> Curve:
    """Return the mean of a curve over a window centred on each point.

    At the begin, where a loss falls fast, the window is narrower on both sides. At the end it is
    cut off on the right alone, so that the last value is the mean of the last half_window + 1
    points, which lags behind a falling loss by a quarter of a window.
    """
    half = half_window(len(curve), share)
    out = []
    for i, (x, _) in enumerate(curve):
        window = [value for _, value in curve[i - min(half, i) : i + min(half, i) + 1]]
        out.append((x, sum(window) / len(window)))
    return out


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Return places, each moved as little as leaves all of them `apart`, in their order."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    groups: list[tuple[float, list[int]]] = []  # (middle, members) of labels that touch
    for i in order:
        groups.append((places[i], [i]))
        while len(groups) > 1:
            (low, below), (high, above) = groups[-2:]
            if high - low >= gap * (len(below) + len(above)) / 2:
                break
            both = below + above
            groups[-2:] = [(sum(places[j] for j in both) / len(both), both)]
    out = [0.0] * len(places)
    for middle, members in groups:
        for k, j in enumerate(members):
            out[j] = middle + gap * (k - (len(members) - 1) / 2)
    return out


def draw(
    runs: dict[str, Run],
    output: Path,
    title: str,
    references: list[tuple[float, str]],
    axis: str = "iterations",
) -> None:
    """Draw the curves of {name: run} to `output`, a .png or .svg by its suffix."""
    with page(output, 8, 4.5, title, dpi=150) as figure:
        axes = axes_at(figure, 0.68, 0.55, 5.5, 3.4)
        axes.grid()
        labels: list[tuple[float, str, str]] = []  # height, text, colour
        end = 0.0
        for colour, (name, run) in zip(PALETTE, runs.items(), strict=False):
            loss = run.curve("loss", axis)
            validation = {
                n: run.curve(n, axis) for n in run.curves if n != "loss" and run.curves[n]
            }
            prefix = f"{name}, " if name else ""
            axes.plot(*zip(*loss, strict=True), color=colour, alpha=0.25, linewidth=0.7)
            smoothed = smooth(loss)
            axes.plot(*zip(*smoothed, strict=True), color=colour, linewidth=1.7)
            final, count = smoothed[-1][1], half_window(len(loss)) + 1
            mean = f" (mean of {count})" if count > 1 else ""
            labels.append((final, f"{prefix}train {final:.2f}{mean}", colour))
            for i, (what, points) in enumerate(validation.items()):
                of_one = PALETTE[1 + i % 7] if len(runs) == 1 else colour
                marker = MARKERS[i % len(MARKERS)] if len(validation) > 1 else "o"
                dots: dict[str, Any] = {"markersize": 4.5, "clip_on": False, "zorder": 3}
                style = f"{marker}-"
                axes.plot(*zip(*points, strict=True), style, color=of_one, linewidth=1, **dots)
                last, of = points[-1][1], what.partition("/")[2]
                labels.append((last, f"{prefix}{of or 'validation'} {last:.2f}", of_one))
            end = max(end, loss[-1][0])
        for value, name in references:
            axes.axhline(value, color=QUIET, linewidth=1, linestyle=(0, (5, 4)))
            labels.append((value, f"{name} {value:.2f}", QUIET))
        axes.set_xlim(0, end)
        _write_labels(axes, labels)
        axes.set(xlabel=AXES[axis], ylabel="loss, nats a token")


def _write_labels(axes: Any, labels: list[tuple[float, str, str]]) -> None:
    """Write each curve's name at the right edge, at the height of its end."""
    per_point = axes.figure.dpi / 72
    low, high = axes.get_ylim()
    top, bottom = (axes.transData.transform((0, y))[1] / per_point for y in (high, low))
    scale = (top - bottom) / (high - low)
    places = [(value - low) * scale for value, _, _ in labels]
    for place, moved, (value, text, colour) in zip(
        places, spread(places, LABEL_GAP), labels, strict=True
    ):
        axes.annotate(
            text,
            (1, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(7, moved - place),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=8.5,
        )


def main() -> None:
    """Read the logs and draw them."""
    parser = Parser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="files of --log-json")
    parser.add_argument(
        "--names", nargs="+", metavar="NAME", help="of the runs (default: their folders' names)"
    )
    parser.add_argument("--axis", choices=AXES, default="iterations", help="what runs across")
    parser.add_argument(
        "--output", type=Path, help="the .png or .svg to write (default: LOG with the ending .png)"
    )
    parser.add_argument("--title", default="Loss", help="title of the picture")
    parser.add_argument(
        "--reference",
        nargs=2,
        action="append",
        default=[],
        metavar=("VALUE", "NAME"),
        help="a dashed line at a loss to compare with, in nats",
    )
    args = parser.parse_args()
    args.output = args.output or args.logs[0].with_suffix(".png")
    try:
        references = [(float(value), name) for value, name in args.reference]
        names = args.names or names_of(args.logs)
        check_name(args.output)
        if len(names) != len(args.logs) or len(set(names)) < len(names):
            raise ValueError(f"--names: {len(args.logs)} different names are needed, one a run")
        if len(names) > len(PALETTE):
            raise ValueError(f"{len(names)} runs: a picture shows at most {len(PALETTE)}")
        runs = {name: read_log(log) for name, log in zip(names, args.logs, strict=True)}
        for log, run in zip(args.logs, runs.values(), strict=True):
            if not run.curves["loss"]:
                raise ValueError(f"{log}: holds no loss yet")
        draw(runs, args.output, args.title, references, args.axis)
        print(f"drawn: {args.output}")
    except (ValueError, OSError) as error:
        sys.exit(error_line("plot_loss.py", error))


def names_of(logs: Sequence[Path]) -> list[str]:
    """Return a name for each log: none for one, else its folder's, or its path."""
    if len(logs) == 1:
        return [""]
    folders = [log.resolve().parent.name for log in logs]
    return folders if len(set(folders)) == len(logs) else [str(log) for log in logs]


if __name__ == "__main__":
    main()
