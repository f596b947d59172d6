# SPDX-License-Identifier: Apache-2.0
"""Draw a step's streams side by side: a rank's compute, and the transfers in flight.

A stream has a row. Boxes above one another are concurrent: a solid transfer is hidden under the
computation above it; for a pale one the rank waits. A step that is longer than the page continues
on the next line, as text does.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from forecast.explainer.timeline import COMPUTE, Box, Part, Streams
from mpu.zero.bucket_layout import block_of
from tools.pictures.style import (
    GRID,
    IDLE,
    INK,
    KINDS,
    PALETTE,
    QUIET,
    RULE,
    axes_at,
    lighter,
    page,
)

MATMULS = {"F": "forward matmul", "B": "dgrad matmul", "W": "wgrad matmul"}
OTHER = "#c9c7c1"
# of the axes' rows, from the top; others follow, and the world comes last
AXES = ("tp", "tp_kv", "cp", "ep", "edp", "dp", "dp_cp", "pp", "pp_back", "embd", "world")
COLOURS = {"tp": PALETTE[3], "cp": PALETTE[5], "ep": PALETTE[4], "dp": PALETTE[7]}
COLOURS |= {"pp": PALETTE[6], "em": PALETTE[6]}  # by the first two letters of an axis
WIDE, LEFT, ACROSS, TOP, BOTTOM = 10.0, 0.8, 9.0, 0.75, 0.5  # inches
ROW, GAP, ABOVE, BELOW = 0.3, 0.06, 0.46, 0.1  # of a line: its rows, gaps, and margins
NAME = 0.3  # of a rank's name, above its first line
UNITS = 19.5  # of time in a line
FONT: Any = {"fontsize": 6.5}
PART_FONT: Any = {"fontsize": 8, "weight": "bold"}
LETTER, PART_LETTER = 0.055, 0.08  # inches: the approximate width of a letter of the two
CONTINUED = ", continued"


class Line(NamedTuple):
    """A stretch of a rank's step that fits the page."""

    of: Streams
    begin: float
    end: float


def draw(ranks: Sequence[Streams], path: Path, title: str, subtitle: str) -> None:
    """Draw the streams of ranks to a .png or an .svg, by the path's suffix."""
    lines = [line for each in ranks for line in cut(each)]
    rows = [_rows(line) for line in lines]
    names = [NAME * bool(line.of.rank and not line.begin) for line in lines]
    heights = [ABOVE + len(each) * (ROW + GAP) + BELOW for each in rows]
    tall = TOP + sum(heights) + sum(names) + BOTTOM
    with page(path, WIDE, tall, title, subtitle) as figure:
        top = TOP
        for line, own, name, height in zip(lines, rows, names, heights, strict=True):
            if name:
                where = (LEFT / WIDE, 1 - (top + name) / tall)
                figure.text(*where, line.of.rank, fontsize=9.5, weight="bold", color=QUIET)
            _draw_line(figure, line, own, top + name)
            top += height + name
        _legend(figure)


def cut(streams: Streams) -> list[Line]:
    """Return the lines of a step: an action begins a new one unless it fits into the last."""
    ends = [part.begin for part in streams.parts[1:]] + [streams.end]
    found, begin = list[Line](), 0.0
    computed = sorted({box.end for box in streams.boxes if box.stream == COMPUTE})
    for part, end in zip(streams.parts, ends, strict=True):
        if end - begin > UNITS and part.begin > begin:
            found.append(Line(streams, begin, part.begin))
            begin = part.begin
        while end - begin > UNITS:
            last = max(at for at in computed if at <= begin + UNITS)
            found.append(Line(streams, begin, last))
            begin = last
    return [*found, Line(streams, begin, streams.end)]


def _rows(line: Line) -> list[tuple[str, list[Box]]]:
    """Return the rows of a line, each a stream and its boxes. A stream has as many rows as it has
    concurrent transfers.
    """
    boxes = [*_inside(line)]
    there = {box.stream for box in boxes}
    known = [axis for axis in AXES[:-1] if axis in there]
    others = sorted(there - {*AXES, COMPUTE})
    found = list[tuple[str, list[Box]]]()
    for stream in (COMPUTE, *known, *others, *(["world"] if "world" in there else [])):
        rows: list[list[Box]] = [[]]
        for box in sorted((box for box in boxes if box.stream == stream), key=lambda b: b.begin):
            free = (row for row in rows if not row or row[-1].end <= box.begin)
            if (row := next(free, None)) is None:
                rows.append(row := [])
            row.append(box)
        found += [(stream, row) for row in rows]
    return found


def _inside(line: Line) -> Iterator[Box]:
    """Yield the boxes of a line, each cut at its ends."""
    for box in line.of.boxes:
        begin, end = max(box.begin, line.begin), min(box.end, line.end)
        if begin < end:
            yield box._replace(begin=begin, end=end)


def _draw_line(
    figure: Any, line: Line, rows: Sequence[tuple[str, list[Box]]], top: float
) -> None:
    count, step = len(rows), ROW + GAP
    axes = axes_at(figure, LEFT, top + ABOVE, ACROSS, count * step)
    axes.set(xlim=(line.begin, line.begin + UNITS), ylim=(count * step, 0), xticks=[])
    before = ["", *(stream for stream, _ in rows)]
    names = [name if name != last else "" for (name, _), last in zip(rows, before, strict=False)]
    axes.set_yticks([row * step + ROW / 2 for row in range(count)], names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    for row, (_, boxes) in enumerate(rows):
        if names[row] and row:
            axes.hlines(row * step - GAP / 2, line.begin, line.end, color=GRID, linewidth=0.6)
        for box in boxes:
            _draw_box(axes, box, row * step)
    _name_blocks(axes, rows[0][1], [part.begin for part in line.of.parts])
    _name_parts(axes, line)


def _draw_box(axes: Any, box: Box, top: float) -> None:
    """Draw a box with its words, where they fit."""
    width, ink = box.end - box.begin, "white"
    look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6}
    if box.stream == COMPUTE:
        colour = KINDS.get(box.kind, OTHER if box.kind == "other" else IDLE)
        ink = {"wait": QUIET, "other": INK}.get(box.kind, "white")
    else:
        colour = COLOURS.get(box.stream[:2], PALETTE[7])
        if box.kind == "waited for":
            look, colour, ink = {"edgecolor": colour, "linewidth": 0.6}, lighter(colour, 0.75), INK
    axes.broken_barh([(box.begin, width)], (top, ROW), facecolor=colour, **look)
    room = width * ACROSS / UNITS - 0.02
    words = [box.layer.rpartition(".")[2]]
    if box.kind == "other" and room < 0.4:
        words = []
    elif box.kind == "wait":
        words = [box.what]
    elif box.stream != COMPUTE:
        words = [box.what, words[0]]
    shown = [each for each in words if LETTER * len(each) <= room]
    if not shown and box.stream != COMPUTE and room > 0.2:
        shown = [words[-1][: int(room / LETTER)]]
    for i, each in enumerate(shown):
        middle = top + ROW * (i + 0.5) / len(shown)
        where: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": ink}
        axes.text(box.begin + width / 2, middle, each, **where, **FONT)


def _name_blocks(axes: Any, boxes: Sequence[Box], begins: Sequence[float]) -> None:
    """Write the blocks of the model above their boxes. begins: of the actions."""
    named = [box for box in boxes if box.kind in MATMULS]
    of = [(block_of(box.layer), bisect(begins, box.begin)) for box in named]
    for (block, _), some in groupby(named, key=lambda box: of[named.index(box)]):
        if not block:
            continue
        of_block = [*some]
        begin, end = of_block[0].begin, of_block[-1].end
        axes.hlines(-0.03, begin, end, color=RULE, linewidth=0.8, clip_on=False)
        words = block[: int((end - begin) * ACROSS / UNITS / LETTER)]
        axes.text((begin + end) / 2, -0.06, words, ha="center", va="bottom", color=QUIET, **FONT)


def _name_parts(axes: Any, line: Line) -> None:
    """Write the actions that begin in a line above their beginnings, and the one that continues."""
    parts = [part for part in line.of.parts if line.begin <= part.begin < line.end]
    if not parts or parts[0].begin > line.begin:
        before = [part for part in line.of.parts if part.begin < line.begin]
        parts.insert(0, Part(before[-1].words + CONTINUED, line.begin))
    per_unit = ACROSS / UNITS
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        room = (following.begin if following else line.begin + UNITS) - part.begin
        words = _that_fits(part.words, int((room * per_unit - 0.1) / PART_LETTER))
        axes.text(part.begin + 0.08, -0.2, words, va="bottom", **PART_FONT)
        axes.vlines(part.begin, -0.32, axes.get_ylim()[0], color=RULE, linewidth=0.6, clip_on=False)


def _that_fits(words: str, letters: int) -> str:
    """Return the name of an action, or as much of it as fits."""
    shorter = (words, words.removesuffix(CONTINUED), words.rpartition(" ")[2])
    return next((each for each in shorter if len(each) <= letters), words[:letters])


def _legend(figure: Any) -> None:
    """Draw the legend of the colours in one line at the end of the page."""
    from matplotlib.patches import Patch

    boxes = [Patch(color=KINDS[kind], label=words) for kind, words in MATMULS.items()]
    boxes.append(Patch(color=OTHER, label="other operations"))
    boxes.append(Patch(color=PALETTE[3], label="transfer, hidden"))
    pale: dict[str, Any] = {"facecolor": lighter(PALETTE[3], 0.75), "edgecolor": PALETTE[3]}
    boxes.append(Patch(label="transfer, waited for", linewidth=0.6, **pale))
    wide, tall = figure.get_size_inches()
    where = (LEFT / wide, 0.22 / tall)
    figure.legend(handles=boxes, loc="center left", bbox_to_anchor=where, ncols=len(boxes))
