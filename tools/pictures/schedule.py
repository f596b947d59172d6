# SPDX-License-Identifier: Apache-2.0
"""Draw the simulated timeline of every pipeline rank.

Each rank has a row: a box for each action, as wide as the action is long, with its micro-batch's
number; pale areas are idle. The strip under a row shows the activations that the rank holds over
time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpu.pipeline.schedules import Schedule
from mpu.pipeline.simulate import Simulation, Span
from tools.pictures.style import DASHES, IDLE, INK, KINDS, QUIET, RULE, axes_at, lighter, page
from tools.pictures.timeline import in_flight, rows, usual_peak

FOR_B_COLOUR, FOR_W_COLOUR = "#b4c2d8", "#a9d0bf"
NAMES = {
    "F": "F, forward",
    "B": "B, gradient of the input",
    "W": "W, gradient of the weights",
}
TITLES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved 1F1B"}
TITLES |= {"zb-h1": "ZB-H1", "zb-v": "ZB-V", "v-half": "V-Half"}
BOX, STRIP = 0.46, 0.31  # of a row: the height of its boxes, and of the strip under them
LEFT, RIGHT, TOP = 1.35, 0.75, 0.72  # inches left and right of the rows and above them
DIGIT = 0.64  # width of a digit in heights of the font


def draw(
    said: Simulation, schedule: Schedule, path: Path, *, axis: str = "", until: float = 0.0
) -> None:
    """Draw a simulated schedule to a .png or an .svg, by the path's suffix.

    axis: the unit of the time axis, in words. until: its end, at least, so that pictures share a
    scale. Raises ValueError for another suffix.
    """
    ranks = rows(said.timeline, schedule)
    first = min(boxes[0].begin for boxes in ranks if boxes)
    last = first + said.step
    lengths = sorted(box.end - box.begin for boxes in ranks for box in boxes)
    end = max(until, last)
    across = min(22.0, max(7.6, 0.05 * (end - first) / lengths[len(lengths) // 2]))
    row = 0.65 if len(ranks) <= 8 else 0.5
    wide, tall = LEFT + across + RIGHT, TOP + row * len(ranks) + 0.95
    with page(path, wide, tall, heading(schedule), caption(said)) as figure:
        axes = axes_at(figure, LEFT, TOP, across, row * len(ranks), yticks=[])
        axes.set(xlim=(first, end), ylim=(len(ranks), 0))
        axes.set_xlabel(f"time ({axis})" if axis else "time", loc="right")
        axes.spines["left"].set_visible(False)
        points = 72 * across / (end - first)  # of a unit of time
        digits = DIGIT * len(str(schedule.micro_batches - 1))
        number = min(8.0, max(5.0, (points * lengths[len(lengths) // 4] - 1) / digits))
        for rank, boxes in enumerate(ranks):
            _draw_boxes(axes, rank, boxes, schedule, points, number)
            axes.barh(rank + BOX / 2, said.step, BOX, first, color=IDLE, zorder=0)
            _draw_in_flight(axes, rank, boxes, schedule, said, last)
            _name_row(axes, rank, schedule, said, 0.08 / across)
        _draw_legend(figure, ranks, schedule, held=any(said.peak))


def heading(schedule: Schedule) -> str:
    """Return a title, such as "ZB-V: 4 ranks, 8 micro-batches, 2 chunks a rank"."""
    sizes = [_count(len(schedule.ranks), "rank"), _count(schedule.micro_batches, "micro-batch")]
    sizes += [f"{schedule.chunks} chunks a rank"] if schedule.chunks > 1 else []
    return f"{TITLES.get(schedule.name, schedule.name)}: {', '.join(sizes)}"


def caption(said: Simulation) -> str:
    """Return the numbers of a step as one line of text."""
    share = f"{said.bubble / said.step:.0%}"
    text = f"step {said.step:.4g}, {said.bubble:.4g} of it bubble ({share})"
    peak = max(said.peak)
    return text + (f"; at most {_count(int(peak), 'activation')} on a rank" if peak else "")


def _draw_boxes(
    axes: Any, rank: int, boxes: Sequence[Span], schedule: Schedule, points: float, number: float
) -> None:
    """Draw a rank's actions. If a B and its W share a box, the W is its lower edge.

    points: the width of a unit of time. number: the font size of micro-batch numbers, which are
    drawn where they fit.
    """
    for (kind, chunk, i), begin, end in boxes:
        wide = points * (end - begin)
        shade = _shade(chunk, schedule.chunks)
        edge: dict[str, Any] = {
            "clip_on": False,
            "edgecolor": "white",
            "linewidth": min(0.7, 0.1 * wide),
            "zorder": 3,
        }
        name = f"rank{rank}-{kind}-chunk{chunk}-{i}"
        colour, middle = lighter(KINDS[kind[0]], shade), rank + BOX / 2
        axes.barh(middle, end - begin, BOX, begin, color=colour, gid=name, **edge)
        if kind == "BW":
            colour = lighter(KINDS["W"], shade)
            axes.barh(rank + 0.9 * BOX, end - begin, 0.2 * BOX, begin, color=colour, **edge)
            middle -= 0.08 * BOX
        if wide > DIGIT * number * len(str(schedule.micro_batches - 1)):
            ink = "white" if shade < 0.3 else INK
            where: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 4}
            axes.text((begin + end) / 2, middle, str(i), fontsize=number, color=ink, **where)


def _draw_in_flight(
    axes: Any,
    rank: int,
    boxes: Sequence[Span],
    schedule: Schedule,
    said: Simulation,
    last: float,
) -> None:
    """Draw the activations that a rank holds: for its B's, and on top of them for its W's."""
    curve = in_flight(boxes)
    floor, usual = rank + BOX + STRIP, usual_peak(schedule)
    unit = 0.92 * STRIP / max(usual, *said.peak)
    times = [*(point.time for point in curve), last]
    for_b = [*(floor - unit * point.for_b for point in curve), floor]
    both = [*(floor - unit * (point.for_b + point.for_w) for point in curve), floor]
    fill: dict[str, Any] = {"step": "post", "linewidth": 0, "zorder": 1}
    axes.fill_between(times, floor, for_b, facecolor=FOR_B_COLOUR, **fill)
    if both != for_b:
        axes.fill_between(times, for_b, both, facecolor=FOR_W_COLOUR, **fill)
    span = (times[0], last)
    axes.hlines(floor, *span, color=RULE, linewidth=0.5)
    if any(said.peak):
        axes.hlines(floor - unit * usual, *span, color=RULE, linewidth=0.6, linestyle=DASHES)


def _name_row(axes: Any, rank: int, schedule: Schedule, said: Simulation, gap: float) -> None:
    """Write the rank and its stages on the left, its idle time and peak on the right.

    gap: between rows and words, as a share of the rows' width.
    """
    peak = f"peak {said.peak[rank]:g}" if any(said.peak) else ""
    idle = 1 - said.busy[rank] / said.step
    for x, align, above, below in (
        (-gap, "right", f"rank {rank}", _stages(schedule, rank)),
        (1 + gap, "left", f"idle {idle:.0%}", peak),
    ):
        where: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": align}
        axes.text(x, rank + BOX / 2, above, va="center_baseline", **where)
        axes.text(x, rank + BOX + STRIP / 2, below, va="center_baseline", color=QUIET, **where)


def _draw_legend(
    figure: Any, ranks: Sequence[Sequence[Span]], schedule: Schedule, held: bool
) -> None:
    """Draw the legend: the boxes in one line, and the strips under them in the next."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {letter for boxes in ranks for box in boxes for letter in box.action.kind}
    boxes = [Patch(color=KINDS[kind], label=name) for kind, name in NAMES.items() if kind in kinds]
    for chunk in range(schedule.chunks if schedule.chunks > 1 else 0):
        colour = lighter("#444444", _shade(chunk, schedule.chunks))
        boxes.append(Patch(color=colour, label=f"chunk {chunk}"))
    boxes.append(Patch(color=IDLE, label="idle"))
    under: list[Any] = []
    if held:
        under.append(Patch(color=FOR_B_COLOUR, label="activations held for B"))
        if schedule.split:
            under.append(Patch(color=FOR_W_COLOUR, label="held for W"))
        most = f"the most that 1F1B holds, {usual_peak(schedule)}"
        under.append(Line2D([], [], color=RULE, linewidth=0.6, linestyle=DASHES, label=most))
    wide, tall = figure.get_size_inches()
    for handles, up in ((boxes, 0.38), (under, 0.17)):
        where = (LEFT / wide, up / tall)
        figure.legend(
            handles=handles, loc="center left", bbox_to_anchor=where, ncols=max(1, len(handles))
        )


def _shade(chunk: int, chunks: int) -> float:
    """Return how much lighter a chunk's boxes are: the first keeps the colour."""
    return 0.55 * chunk / max(1, chunks - 1)


def _stages(schedule: Schedule, rank: int) -> str:
    """Return the numbers of a rank's stages as text, without the middle ones of many."""
    stages = [str(schedule.stage(rank, chunk)) for chunk in range(schedule.chunks)]
    if len(stages) > 4:
        stages[2:-1] = ["…"]
    return f"{'stage' if schedule.chunks == 1 else 'stages'} {', '.join(stages)}"


def _count(n: int, what: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    plural = "es" if what.endswith("ch") else "s"
    return f"{n} {what}{'' if n == 1 else plural}"
