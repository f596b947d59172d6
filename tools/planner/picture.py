# SPDX-License-Identifier: Apache-2.0
"""Draw plans as SVG: memory against time with its Pareto front, where the best step goes, and what
its pipeline ranks do when.
"""

from html import escape

import numpy as np

from tools.pictures.schedule import COLOURS
from tools.pictures.style import GRID, INK, PALETTE, QUIET, RULE, STYLE
from tools.planner.search import Plans
from tools.planner.table import TERMS, breakdown, timeline

WIDTH, HEIGHT, LEFT, TOP = 900, 602, 70, 64
PLOT_W, PLOT_H, BAR = 780, 350, 34
ROW, MOST_BOXES = 14, 6000  # height of a pipeline rank; more boxes are too many to see
POINT, FRONT, LIMIT = PALETTE[0], PALETTE[2], PALETTE[6]
PARTS = (*PALETTE, QUIET, INK)[: len(TERMS)]
FONT = ", ".join(STYLE["font.sans-serif"]) + ", sans-serif"


def pareto(plans: Plans) -> list[int]:
    """Return the layouts that no other beats in both time and memory, fastest first."""
    front, least = [], float("inf")
    for n in np.lexsort((plans.bytes, plans.times.step)):
        if plans.bytes[n] < least:
            front.append(int(n))
            least = float(plans.bytes[n])
    return front


def svg(plans: Plans) -> str:
    """Return the picture: each layout a point, those that fit filled; below it the best step."""
    seconds, gb = plans.times.step, plans.bytes / 1e9
    low, high = float(seconds.min()), float(min(seconds.max(), 4 * seconds.min()))
    most = float(min(gb.max(), 2.5 * plans.limit / 1e9))

    def place(n: int) -> tuple[float, float]:
        x = LEFT + PLOT_W * (np.log(seconds[n] / low) / max(np.log(high / low), 1e-9))
        return float(x), float(TOP + PLOT_H * (1 - gb[n] / most))

    limit, best = TOP + PLOT_H * (1 - plans.limit / 1e9 / most), plans.best(1)
    step = _step(plans, best[0], HEIGHT) if best else []
    height = HEIGHT + (60 + ROW * plans.layouts[best[0]].pp if step else 0)
    fits = f"{int(plans.fits.sum()):,} of {len(plans.layouts):,} layouts fit; filled: it fits"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="{FONT}" font-size="11" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="bold">{escape(plans.model.name)} on '
        f"{plans.cluster.gpus:,} GPUs</text>",
        f'<text x="{LEFT}" y="43" fill="{QUIET}">{fits}; the line: none is faster with less</text>',
        *_axes(low, high, most),
        f'<line x1="{LEFT}" x2="{LEFT + PLOT_W}" y1="{limit:.1f}" y2="{limit:.1f}" '
        f'stroke="{LIMIT}" stroke-dasharray="5 4"/>',
        f'<text x="{LEFT + PLOT_W}" y="{limit - 4:.1f}" fill="{LIMIT}" text-anchor="end">'
        f"a GPU has {plans.limit / 1e9:.1f} GB</text>",
    ]
    for n in range(len(plans.layouts)):
        if seconds[n] <= high and gb[n] <= most:
            x, y = place(n)
            fill = POINT if plans.fits[n] else "none"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{POINT}">'
                f"<title>{escape(plans.layouts[n].flags())}: {seconds[n]:.2f} s, {gb[n]:.1f} GB"
                "</title></circle>"
            )
    front = [place(n) for n in pareto(plans) if seconds[n] <= high and gb[n] <= most]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{FRONT}" stroke-width="1.5"/>')
    if best:
        parts += _bar(plans, best[0], TOP + PLOT_H + 68)
    parts += step
    return "\n".join([*parts, "</svg>", ""])


def _axes(low: float, high: float, most: float) -> list[str]:
    """Return grid, ticks with their units, and what each axis counts."""
    parts, bottom = [], TOP + PLOT_H
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = LEFT + PLOT_W * share, bottom - PLOT_H * share
        colour = RULE if share == 0 else GRID
        parts += [
            f'<line x1="{LEFT}" x2="{LEFT + PLOT_W}" y1="{y:.0f}" y2="{y:.0f}" stroke="{colour}"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end" fill="{QUIET}">'
            f"{most * share:.0f} GB</text>",
            f'<text x="{x:.0f}" y="{bottom + 16}" text-anchor="middle" fill="{QUIET}">'
            f"{low * (high / low) ** share:.3g} s</text>",
        ]
    across = "seconds of a step, on a logarithmic axis"
    parts.append(f'<text x="{LEFT + PLOT_W}" y="{bottom + 32}" text-anchor="end" fill="{QUIET}">'
                 f"{across}</text>")  # fmt: skip
    parts.append(f'<text x="{LEFT}" y="{TOP - 8}" fill="{QUIET}">memory of a GPU</text>')
    return parts


def _bar(plans: Plans, n: int, y: float) -> list[str]:
    told = breakdown(plans, n)
    parts = [f'<text x="{LEFT}" y="{y - 8:.0f}">the best step, {told.step:.2f} s</text>']
    x = float(LEFT)
    for row, (colour, key) in enumerate(zip(PARTS, TERMS, strict=True)):
        width = PLOT_W * told.seconds[key] / told.step
        parts.append(f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{BAR}" '
                     f'fill="{colour}"><title>{TERMS[key]}</title></rect>')  # fmt: skip
        at = LEFT + 270 * (row % 3), y + BAR + 20 + 20 * (row // 3)
        parts.append(f'<rect x="{at[0]}" y="{at[1] - 9:.0f}" width="10" height="10" '
                     f'fill="{colour}"/><text x="{at[0] + 14}" y="{at[1]:.0f}">{TERMS[key]}: '
                     f"{told.seconds[key]:.3f} s</text>")  # fmt: skip
        x += width
    return parts


def _step(plans: Plans, n: int, y: float) -> list[str]:
    """Return the best step as a timeline: a row for each pipeline rank, then sums and update.

    Of many micro-batches the first ones are drawn, as in a step that has no more.
    """
    each, t = plans.layouts[n], plans.times
    one = 3 * each.pp * each.virtual
    count = min(each.micro_batches, MOST_BOXES // one // each.pp * each.pp)
    if count < 1:
        return []
    ranks = timeline(plans, n, count).ranks
    end = max(spans[-1].end for spans in ranks)
    after = (("sums of gradients, gathers of weights", float(t.sums[n]), PALETTE[4]),
             ("the optimizer", float(t.update[n]), PALETTE[5]))  # fmt: skip
    scale = PLOT_W / (end + sum(seconds for _, seconds, _ in after))
    part = "" if count == each.micro_batches else f" with {count} of its {each.micro_batches:,}"
    parts = [
        f'<text x="{LEFT}" y="{y + 4:.0f}">the best step{part or " with all its"} micro-batches: '
        "F blue, B orange, W green; then sums and update</text>"
    ]
    for row, spans in enumerate(ranks):
        top = y + 14 + ROW * row
        parts.append(f'<text x="{LEFT - 6}" y="{top + 10:.0f}" text-anchor="end" fill="{QUIET}">'
                     f"pp {row}</text>")  # fmt: skip
        for action, begin, until in spans:
            parts.append(
                f'<rect x="{LEFT + begin * scale:.2f}" y="{top:.0f}" height="{ROW - 2}" '
                f'width="{(until - begin) * scale:.2f}" fill="{COLOURS[action.kind]}" '
                f'stroke="white" stroke-width="0.3"><title>{action}</title></rect>'
            )
        x = LEFT + end * scale
        for what, seconds, colour in after:
            parts.append(f'<rect x="{x:.2f}" y="{top:.0f}" height="{ROW - 2}" fill="{colour}" '
                         f'width="{seconds * scale:.2f}"><title>{what}</title></rect>')  # fmt: skip
            x += seconds * scale
    told_of = f"{end + sum(seconds for _, seconds, _ in after):.2f} s"
    parts.append(f'<text x="{LEFT + PLOT_W}" y="{y + 30 + ROW * len(ranks):.0f}" fill="{QUIET}" '
                 f'text-anchor="end">{told_of}</text>')  # fmt: skip
    return parts
