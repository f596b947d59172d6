# SPDX-License-Identifier: Apache-2.0
"""Draw the losses of runs from their --log-json files, as a picture fit for a README.

    python tools/plot_loss.py runs/quickstart/tp2/log.jsonl --output loss.png \\
        --reference 5.9 "unigram entropy" --title "Llama, 3.4 M parameters, TP 2"
    python tools/plot_loss.py base/log.jsonl wide/log.jsonl --names base wide --axis tokens \\
        --output both.svg

    python tools/plot_loss.py runs/mine/log.jsonl --panels lr grad-norm tokens-per-second

Each run has one colour: its training loss is a line, its validation loss a line with dots. Sets of
--multiple-validation-sets have a curve each, with dots of different shapes. The legend has each
curve's name and last value; that of the training loss is a mean over the run's last steps, whose
number it shows. --panels draws other values of the log below the loss, in the runs' colours.
"""

import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from tools.command_line import Parser, error_line
from tools.pictures.style import PALETTE, QUIET, axes_at, check_name, page
from training.files.untrusted import parse_json, read_plain

LARGEST = 1 << 30  # bytes of a log
AXES = {"iterations": "iteration", "tokens": "tokens", "time": "hours of training steps"}
VALIDATION = "validation_loss"  # a set's name follows, after "/"
PANELS = {  # name of --panels: its key in a log, and its label in the picture
    "lr": ("lr", "learning rate"),
    "grad-norm": ("grad_norm", "gradient norm"),
    "tokens-per-second": ("tokens_per_second", "tokens/s"),
}
MARKERS = "osD^vP*X"  # of the sets
# inches: the page's width, the margins left of, above and below the axes, the gap between panels,
# the width of the axes, and the heights of the loss and of a panel
WIDE, LEFT, TOP, BOTTOM, BETWEEN = 8.0, 0.68, 0.55, 0.55, 0.25
ACROSS, TALL, PANEL = 7.0, 3.4, 0.95
PANEL_CURVES = tuple(curve for curve, _ in PANELS.values())
Curve = list[tuple[float, float]]


@dataclass
class Run:
    """The contents of a log: {"loss": {iteration: value}, ...}, and the places of its iterations.

    curves: "loss", "validation_loss", and "validation_loss/NAME" for each of several sets, and
    those of PANELS.
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
        k = bisect_left(places, i, key=itemgetter(0))
        before, (tokens, seconds) = places[k - 1] if k else (0, (0.0, 0.0))
        if k < len(places):
            end, (more, later) = places[k]
            share = (i - before) / (end - before)
            tokens, seconds = tokens + share * (more - tokens), seconds + share * (later - seconds)
        return tokens, seconds / 3600


def read_log(path: Path) -> Run:
    """Return the curves of a run.

    If a resumed run repeats iterations, the later line counts and the one it replaces is dropped.
    An incomplete last line, of a run that continues or was killed, is left out.
    """
    legs: list[list[_Line]] = [[]]  # a new one each time the run went back
    last = trained = 0  # the iterations of the line before, and of this leg's last with a loss
    lines = read_plain(path, LARGEST).splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            read = _read(parse_json(line, ""))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            if 1 < number == len(lines) and not line.endswith(b"\n"):
                break
            raise ValueError(f"{path}, line {number}: not a line of a --log-json file") from None
        # a line of several steps may begin before an evaluation in between: that is not a resume,
        # but training one iteration twice is
        if read.iteration < last or (read.trains and read.first <= trained):
            legs.append([])
            trained = 0
        legs[-1].append(read)
        last, trained = read.iteration, read.iteration if read.trains else trained
    names = {"loss", VALIDATION, *PANEL_CURVES}.union(
        *(read.points for leg in legs for read in leg)
    )
    curves: dict[str, dict[int, float]] = {name: {} for name in sorted(names)}
    at: dict[int, tuple[float, float]] = {}
    for leg in legs:
        # an evaluation alone, before a first step or by --skip-train, replaces nothing
        first = min((read.first for read in leg if read.trains), default=math.inf)
        curves = {n: {i: v for i, v in c.items() if i < first} for n, c in curves.items()}
        at = {i: place for i, place in at.items() if i < first}
        for read in leg:
            for name, points in read.points.items():
                curves[name] |= {i: v for i, v in points.items() if v is not None}
            before = next(reversed(at), 0)
            if read.speed is not None and read.iteration > before:
                rate, step = read.speed
                tokens, seconds = at.get(before, (0.0, 0.0))
                took = (read.iteration - before) * step
                tokens = tokens + took * rate if read.tokens is None else read.tokens
                at[read.iteration] = tokens, seconds + took
    return Run(curves, at)


@dataclass
class _Line:
    """A line of a log: the points of each curve, and the progress and speed of the run.

    speed: (tokens a second, seconds a step), None if the line has no step time.
    """

    iteration: int
    points: dict[str, dict[int, Any]]
    speed: tuple[float, float] | None
    tokens: float | None
    trains: bool

    @property
    def first(self) -> int:
        """Return the first iteration that the line covers."""
        return min(self.points["loss"])


def _read(record: dict[str, Any]) -> _Line:
    """Return a record's points. Raises ValueError, KeyError, TypeError, AttributeError or
    OverflowError for one that Log did not write.
    """
    iteration = int(record["iteration"])
    names = ["loss", *PANEL_CURVES, *(n for n in record if n.partition("/")[0] == VALIDATION)]
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
    """Return the points of half a window of `smooth`: about share / 2 of all points.

    A short curve has at least five, or a quarter of its points.
    """
    return max(round(share * points / 2), min(5, points // 4))


def smooth(curve: Curve, share: float = 0.04) -> Curve:
    """Return the mean of a curve over a window centred on each point.

    At the beginning, where a loss falls fast, the window is narrower on both sides. At the end it
    is cut off on the right only, so the last value is the mean of the last half_window + 1 points,
    which lags behind a falling loss by a quarter of a window.
    """
    half = half_window(len(curve), share)
    sums = [0.0, *accumulate(value for _, value in curve)]
    out = []
    for i, (x, _) in enumerate(curve):
        low, high = i - min(half, i), min(len(curve), i + min(half, i) + 1)
        out.append((x, (sums[high] - sums[low]) / (high - low)))
    return out


def draw(
    runs: dict[str, Run],
    output: Path,
    title: str,
    references: list[tuple[float, str]],
    axis: str = "iterations",
    panels: Sequence[str] = (),
) -> None:
    """Draw the curves of {name: run} to `output`, a .png or .svg by its suffix.

    panels: keys of PANELS, drawn below the loss.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

    below = len(panels) * (PANEL + BETWEEN)
    with page(output, WIDE, TOP + TALL + below + BOTTOM, title, dpi=150) as figure:
        axes = axes_at(figure, LEFT, TOP, ACROSS, TALL)
        others = [
            axes_at(
                figure, LEFT, TOP + TALL + BETWEEN + k * (PANEL + BETWEEN), ACROSS, PANEL,
                sharex=axes,
            )
            for k in range(len(panels))
        ]  # fmt: skip
        _draw_losses(axes, runs, axis)
        for value, name in references:
            axes.axhline(
                value, color=QUIET, linewidth=1, linestyle=(0, (5, 4)), label=f"{name} {value:.2f}"
            )
        axes.set(ylabel="loss, nats a token")
        for each, panel in zip(others, panels, strict=True):
            _draw_panel(each, runs, axis, panel)
        curves = [run.curve(n, axis) for run in runs.values() for n in _shown(run)]
        axes.set_xlim(0, max(x for curve in curves for x, _ in curve) or 1)
        every = [axes, *others]
        for each in every:
            each.grid()
            each.tick_params(labelbottom=each is every[-1])
        if axis == "tokens":
            every[-1].xaxis.set_major_formatter(EngFormatter())
        elif axis == "iterations":
            every[-1].xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            every[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        every[-1].set_xlabel(AXES[axis])
        for text in axes.legend(loc="upper right").get_texts():
            text.set_parse_math(False)


def _shown(run: Run) -> list[str]:
    """Return the names of the losses that a run has, training first."""
    sets = [name for name in run.curves if name.partition("/")[0] == VALIDATION]
    return [name for name in ("loss", *sets) if run.curves[name]]


def _draw_losses(axes: Any, runs: dict[str, Run], axis: str) -> None:
    """Draw the losses of each run, with their names and last values for the legend."""
    for colour, (name, run) in zip(PALETTE, runs.items(), strict=False):
        prefix = f"{name}, " if name else ""
        shown = _shown(run)
        if "loss" in shown:
            _draw_smoothed(axes, run.curve("loss", axis), colour, f"{prefix}train")
            shown.remove("loss")
        for i, what in enumerate(shown):
            points = run.curve(what, axis)
            of_one = PALETTE[1 + i % 7] if len(runs) == 1 else colour
            marker = MARKERS[i % len(MARKERS)] if len(shown) > 1 else "o"
            label = f"{prefix}{what.partition('/')[2] or 'validation'} {points[-1][1]:.2f}"
            dots: dict[str, Any] = {"markersize": 4.5, "clip_on": False, "zorder": 3}
            axes.plot(*zip(*points, strict=True), f"{marker}-", color=of_one, linewidth=1,
                      label=label, **dots)  # fmt: skip


def _draw_smoothed(axes: Any, curve: Curve, colour: str, name: str) -> None:
    """Draw a curve and, over it, its means; the legend has the last mean and its number of points.
    """
    x, y = zip(*curve, strict=True)
    if len(curve) == 1:
        label = f"{name} {y[0]:.2f}"
        axes.plot(x, y, "o", color=colour, markersize=3.5, clip_on=False, label=label)
        return
    axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.7)
    smoothed, count = smooth(curve), half_window(len(curve)) + 1
    label = f"{name} {smoothed[-1][1]:.2f}" + f" (mean of {count})" * (count > 1)
    axes.plot(*zip(*smoothed, strict=True), color=colour, linewidth=1.7, label=label)


def _draw_panel(axes: Any, runs: dict[str, Run], axis: str, panel: str) -> None:
    """Draw each run's curve of a panel; the gradient norm is smoothed as the loss is."""
    name, words = PANELS[panel]
    for colour, run in zip(PALETTE, runs.values(), strict=False):
        if not (curve := run.curve(name, axis)):
            continue
        if panel == "grad-norm" or len(curve) == 1:
            _draw_smoothed(axes, curve, colour, "")
        else:
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.2)
    axes.set_ylabel(words)
    axes.ticklabel_format(axis="y", scilimits=(-2, 4))
    if panel != "grad-norm":
        axes.set_ylim(bottom=0)


def main() -> None:
    """Read the logs and draw them."""
    parser = Parser(__doc__)
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="files of --log-json")
    parser.add_argument(
        "--names", nargs="+", metavar="NAME", help="names of the runs (default: of their folders)"
    )
    parser.add_argument("--axis", choices=AXES, default="iterations", help="horizontal axis")
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
    parser.add_argument(
        "--panels",
        nargs="+",
        choices=PANELS,
        default=[],
        metavar="PANEL",
        help=f"what to draw below the loss: {', '.join(PANELS)}",
    )
    args = parser.parse_args()
    args.output = args.output or args.logs[0].with_suffix(".png")
    try:
        references = [(_finite(value), name) for value, name in args.reference]
        names = args.names or names_of(args.logs)
        check_name(args.output)
        if len(names) != len(args.logs) or len(set(names)) < len(names):
            raise ValueError(f"--names: {len(args.logs)} different names are needed, one per run")
        if len(names) > len(PALETTE):
            raise ValueError(f"{len(names)} logs: a picture shows at most {len(PALETTE)} runs")
        runs = {name: read_log(log) for name, log in zip(names, args.logs, strict=True)}
        for log, run in zip(args.logs, runs.values(), strict=True):
            if not _shown(run):
                raise ValueError(f"{log} has no loss yet")
        for panel in args.panels:
            name, words = PANELS[panel]
            if not any(run.curves[name] for run in runs.values()):
                logs = ", ".join(map(str, args.logs))
                raise ValueError(f"--panels {panel}: there is no {words} in {logs}")
        draw(
            runs,
            args.output,
            title=args.title,
            references=references,
            axis=args.axis,
            panels=[*dict.fromkeys(args.panels)],
        )
        print(f"drawn: {args.output}")
    except (ValueError, OSError) as error:
        sys.exit(error_line("plot_loss.py", error))


def _finite(text: str) -> float:
    """Return the number of --reference. Raises ValueError for other text."""
    try:
        if math.isfinite(value := float(text)):
            return value
    except ValueError:
        pass
    raise ValueError(f"--reference {text}: must be a finite number, then its name")


def names_of(logs: Sequence[Path]) -> list[str]:
    """Return a name for each log: "" for a single one, else its folder's name, or its path."""
    if len(logs) == 1:
        return [""]
    folders = [log.resolve().parent.name for log in logs]
    return folders if len(set(folders)) == len(logs) else [str(log) for log in logs]


if __name__ == "__main__":
    main()
