# SPDX-License-Identifier: Apache-2.0
"""Draw what every pipeline rank does when, simulated or measured, as a picture.

Each rank has a row: a box for each action, as wide as the action is long, with its micro-batch's
number; pale time is idle. The strip under a row shows the activations that the rank holds over
time. A plan and a run of it are drawn alike, so that the two pictures can be laid side by side.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estimate.simulate import Span, Timeline
from mpu.pipeline.schedules import Schedule
from tools.pictures.timeline import Summary, Wait, held, rows, summary, usual_peak, waits

# Distinct under the common colour blindnesses, also in the lighter shades of later chunks.
COLOURS = {"F": "#1d4f91", "B": "#d26a14", "W": "#4a9a78"}
HELD_FOR_B, HELD_FOR_W = "#b4c2d8", "#a9d0bf"
IDLE, RULE, QUIET, INK = "#f1f0ed", "#9a9a9a", "#666666", "#222222"
KINDS = {
    "F": "F, forward",
    "BW": "backward, B and W in one",
    "B": "B, gradient of the input",
    "W": "W, gradient of the weights",
}
TITLES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved 1F1B"}
TITLES |= {"zb-h1": "ZB-H1", "zb-v": "ZB-V", "v-half": "V-Half"}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "text.color": INK,
    "svg.fonttype": "none",  # text stays text: small, searchable, for screen readers
    "svg.hashsalt": "weft",  # the same picture is the same file
}
DASHED: dict[str, Any] = {"color": RULE, "linestyle": (0, (4, 3)), "linewidth": 0.6}
ARROW: dict[str, Any] = {
    "arrowstyle": "-|>",
    "color": "#555555",
    "linewidth": 0.7,
    "mutation_scale": 6,
    "shrinkA": 0,
    "shrinkB": 0,
}
LEGEND: dict[str, Any] = {
    "loc": "center left",
    "frameon": False,
    "handlelength": 1.4,
    "handleheight": 0.9,
    "handletextpad": 0.5,
    "columnspacing": 1.5,
    "borderpad": 0,
    "borderaxespad": 0,
}
MOST_ARROWS = 48  # a picture that needs more is easier to read without them
DIGIT = 0.64  # width of a digit in heights of the font


def draw(
    timeline: Timeline,
    schedule: Schedule,
    path: Path,
    *,
    title: str | None = None,
    subtitle: str | None = None,
    unit: str = "",
    axis: str = "",
    until: float | None = None,
) -> None:
    """Draw a timeline of a schedule to a .png or an .svg, by the path's suffix.

    title, subtitle: replace `heading` and `caption`. unit: of the times. axis: what the time axis
    counts, in words. until: the length of the longest picture of a row that shares one scale; this
    one is as wide as its own step. Raises ValueError for another suffix or no actions.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: a picture is a .png or an .svg")
    if not any(timeline.ranks):
        raise ValueError(f"{path}: no rank did anything, so there is nothing to draw")
    import matplotlib

    with matplotlib.rc_context(STYLE):
        page = _Page(rows(timeline, schedule), schedule, until)
        for rank in range(len(page.ranks)):
            page.draw_boxes(rank)
            page.draw_held(rank)
            page.name_row(rank)
        arrows = waits(page.ranks, schedule)
        if len(arrows) > MOST_ARROWS:
            arrows = []
        page.draw_waits(arrows)
        page.draw_legends(with_arrows=bool(arrows))
        said = caption(page.numbers, unit) if subtitle is None else subtitle
        named = f"time ({axis or unit})" if axis or unit else "time"
        page.write(title or heading(schedule), said, named)
        path.parent.mkdir(parents=True, exist_ok=True)
        page.figure.savefig(
            path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None
        )


def heading(schedule: Schedule) -> str:
    """Return a title, such as "ZB-V: 4 ranks, 8 micro-batches, 2 chunks a rank"."""
    sizes = [_count(len(schedule.ranks), "rank"), _count(schedule.micro_batches, "micro-batch")]
    sizes += [f"{schedule.chunks} chunks a rank"] if schedule.chunks > 1 else []
    return f"{TITLES.get(schedule.name, schedule.name)}: {', '.join(sizes)}"


def caption(numbers: Summary, unit: str = "") -> str:
    """Return the numbers of a step as one line of text."""
    step, bubble = (f"{x:.4g} {unit}".rstrip() for x in (numbers.step, numbers.bubble))
    said = f"step {step}, {bubble} of it bubble ({numbers.bubble / numbers.step:.0%})"
    peak = max(numbers.peak)
    return said + (f"; at most {_count(peak, 'activation')} on a rank" if peak else "")


class _Page:
    """A page that is being drawn, in inches: a row is a line of boxes, a strip, and a gap."""

    def __init__(
        self, ranks: list[list[Span]], schedule: Schedule, until: float | None = None
    ) -> None:
        """Lay out the page: a long step makes it wider, with larger letters, up to a point."""
        from matplotlib.figure import Figure

        self.ranks, self.schedule, self.numbers = ranks, schedule, summary(ranks)
        self.first = min(boxes[0].begin for boxes in ranks if boxes)
        self.last = self.first + self.numbers.step
        end = self.last if until is None else max(until, self.last)
        lengths = sorted(box.end - box.begin for boxes in ranks for box in boxes)
        short, typical = lengths[len(lengths) // 4], lengths[len(lengths) // 2]
        inside = min(22.0, max(7.6, 0.05 * (end - self.first) / typical))
        self.points = 72 * inside / (end - self.first)  # how wide a unit of time is
        own = inside * (self.last - self.first) / (end - self.first)
        per_point = DIGIT * len(str(schedule.micro_batches - 1))  # a number's width over its font
        self.number = 0.0  # its font; 0 where numbers do not fit
        if self.points * typical > 5.0 * per_point:
            self.number = min(8.0, max(5.0, (self.points * short - 1) / per_point))
        self.zoom = zoom = math.sqrt(inside / 7.6)
        rows = 0.65 * zoom * (1.0 if len(ranks) <= 4 else 0.85 if len(ranks) <= 8 else 0.68)
        self.box, self.strip, self.pitch = 0.46 * rows, 0.31 * rows, rows
        self.font = min(8.0 * zoom, 14.5 * rows)
        self.stages = [_stages(schedule, rank) for rank in range(len(ranks))]
        self.left = zoom * (0.25 + 0.055 * max(9, *map(len, self.stages)))
        self.right, bottom, tall = 0.85 * zoom, 0.98 * zoom, len(ranks) * rows
        self.width, self.height = self.left + own + self.right, 0.72 * zoom + tall + bottom
        self.figure = Figure(figsize=(self.width, self.height), dpi=200)
        across, up = own / self.width, tall / self.height
        place = (self.left / self.width, bottom / self.height, across, up)
        limits: dict[str, Any] = {"xlim": (self.first, self.last), "ylim": (tall, 0)}
        self.axes = self.figure.add_axes(place, yticks=[], **limits)
        self.axes.spines[["left", "right", "top"]].set_visible(False)
        self.axes.spines["bottom"].set_color(RULE)
        self.axes.tick_params(color=RULE, labelcolor=QUIET, labelsize=7.5 * zoom, length=3)

    def rectangle(
        self, begin: float, end: float, top: float, height: float, colour: str, **more: Any
    ) -> None:
        """Draw a rectangle from begin to end."""
        from matplotlib.patches import Rectangle

        corner = (begin, top)
        self.axes.add_patch(
            Rectangle(corner, end - begin, height, facecolor=colour, clip_on=False, **more)
        )

    def draw_boxes(self, rank: int) -> None:
        """Draw what a rank does, over a pale line that shows where it is idle."""
        top, low = rank * self.pitch, 0.2 * self.box
        middle = top + (0.52 if self.schedule.split else 0.44) * self.box
        self.rectangle(self.first, self.last, top, self.box, IDLE, zorder=0)
        for (kind, chunk, i), begin, end in self.ranks[rank]:
            width = self.points * (end - begin)
            shade = _shade(chunk, self.schedule.chunks)
            edge: dict[str, Any] = {"edgecolor": "white", "linewidth": min(0.7, 0.1 * width)}
            name = f"rank{rank}-{kind}-chunk{chunk}-{i}"
            colour = _lighter(COLOURS[kind[0]], shade)
            self.rectangle(begin, end, top, self.box, colour, gid=name, zorder=3, **edge)
            if kind == "BW":
                colour, under = _lighter(COLOURS["W"], shade), top + self.box - low
                self.rectangle(begin, end, under, low, colour, zorder=3, **edge)
            if self.number and width > DIGIT * self.number * len(str(i)):
                self.axes.text(
                    (begin + end) / 2,
                    middle,
                    str(i),
                    fontsize=self.number,
                    color="white" if shade < 0.3 else INK,
                    ha="center",
                    va="center_baseline",
                    zorder=4,
                )

    def draw_held(self, rank: int) -> None:
        """Draw the activations that a rank holds: for its B's, and on top of them for its W's."""
        curve = held(self.ranks[rank])
        floor = rank * self.pitch + self.box + self.strip
        scale = 0.92 * self.strip / max(usual_peak(self.schedule), *self.numbers.peak)
        times = [*(point.time for point in curve), self.last]
        for_b = [*(floor - scale * point.for_b for point in curve), floor]
        both = [*(floor - scale * (point.for_b + point.for_w) for point in curve), floor]
        fill: dict[str, Any] = {"step": "post", "linewidth": 0, "zorder": 1}
        self.axes.fill_between(times, floor, for_b, facecolor=HELD_FOR_B, **fill)
        if both != for_b:
            self.axes.fill_between(times, for_b, both, facecolor=HELD_FOR_W, **fill)
        span = [self.first, self.last]
        self.axes.plot(span, [floor, floor], color=RULE, linewidth=0.5)
        if max(self.numbers.peak):
            usual = floor - scale * usual_peak(self.schedule)
            self.axes.plot(span, [usual, usual], **DASHED)

    def name_row(self, rank: int) -> None:
        """Write on the left which rank it is and its stages, on the right its numbers."""
        idle = f"idle {self.numbers.idle[rank]:.0%}"
        peak = f"peak {self.numbers.peak[rank]}" if max(self.numbers.peak) else ""
        boxes, strip = self.box / 2, self.box + self.strip / 2
        for down, x, text, colour in (
            (boxes, 0, f"rank {rank}", INK),
            (strip, 0, self.stages[rank], QUIET),
            (boxes, 1, idle, INK),
            (strip, 1, peak, QUIET),
        ):
            self.axes.annotate(
                text,
                (x, rank * self.pitch + down),
                xycoords=self.axes.get_yaxis_transform(),
                xytext=(8 if x else -8, 0),
                textcoords="offset points",
                fontsize=self.font,
                color=colour,
                ha="left" if x else "right",
                va="center_baseline",
            )

    def draw_waits(self, arrows: Sequence[Wait]) -> None:
        """Draw the messages that idle ranks waited for, from box to box.

        Between neighbours an arrow lies behind the boxes; one that passes other ranks lies on them,
        in a white edge, and is whole.
        """
        from matplotlib.patheffects import withStroke

        edge = [withStroke(linewidth=2.2, foreground="white")]
        for sender, sent, taker, begun in arrows:
            down, far = taker > sender, abs(taker - sender) > 1
            self.axes.annotate(
                "",
                (begun, taker * self.pitch + (0 if down else self.box)),
                (sent, sender * self.pitch + (self.box if down else 0)),
                arrowprops=ARROW | ({"path_effects": edge} if far else {}),
                annotation_clip=False,
                zorder=5 if far else 2,
            )

    def draw_legends(self, with_arrows: bool) -> None:
        """Explain the boxes in one line and what lies under them in the next."""
        from matplotlib.legend_handler import HandlerTuple
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        def patches(*colours: str) -> tuple[Patch, ...]:
            return tuple(Patch(facecolor=colour) for colour in colours)

        kinds = {box.action.kind for boxes in self.ranks for box in boxes}
        boxes: dict[str, Any] = {
            name: patches(*(COLOURS[letter] for letter in kind))
            for kind, name in KINDS.items()
            if kind in kinds
        }
        chunks = self.schedule.chunks
        if chunks > 1:
            shades = (_lighter("#444444", _shade(chunk, chunks)) for chunk in range(chunks))
            boxes["chunk " + ", ".join(map(str, range(chunks)))] = patches(*shades)
        boxes["idle"] = patches(IDLE)
        under: dict[str, Any] = {}
        if max(self.numbers.peak):
            under["activations held for B"] = patches(HELD_FOR_B)
            if self.schedule.split:
                under["held for W"] = patches(HELD_FOR_W)
            usual = usual_peak(self.schedule)
            under[f"the most that 1F1B holds, {usual}"] = Line2D([], [], **DASHED)
        if with_arrows:
            line = Line2D([], [], color=ARROW["color"], linewidth=ARROW["linewidth"])
            under["message that a rank waited for"] = line
        handlers: Any = {tuple: HandlerTuple(ndivide=None, pad=0)}
        for entries, up in ((boxes, 0.4 * self.zoom), (under, 0.18 * self.zoom)):
            self.figure.legend(
                list(entries.values()),
                list(entries),
                handler_map=handlers,
                bbox_to_anchor=(self.left / self.width, up / self.height),
                ncols=max(1, len(entries)),
                fontsize=7.5 * self.zoom,
                **LEGEND,
            )

    def write(self, title: str, subtitle: str, axis: str) -> None:
        """Write what is drawn, its numbers, and what the time axis counts."""
        left, right = self.left / self.width, 1 - self.right / self.width
        inch = self.zoom / self.height
        small: dict[str, Any] = {"color": QUIET, "fontsize": 7.5 * self.zoom}
        self.figure.text(left, 1 - 0.33 * inch, title, fontsize=12 * self.zoom, weight="bold")
        self.figure.text(left, 1 - 0.55 * inch, subtitle, color=QUIET, fontsize=8.5 * self.zoom)
        self.figure.text(right, 0.62 * inch, axis, ha="right", va="center", **small)


def _shade(chunk: int, chunks: int) -> float:
    """Return how much lighter a chunk's boxes are: the first keeps the colour."""
    return 0.55 * chunk / max(1, chunks - 1)


def _lighter(colour: str, share: float) -> str:
    """Mix a share of white into a colour."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


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
