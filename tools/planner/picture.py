# SPDX-License-Identifier: Apache-2.0
"""Draw plans as SVG: memory against time with its Pareto front, and where the best step goes."""

from html import escape

import numpy as np

from tools.planner.search import Plans
from tools.planner.table import TERMS, breakdown

WIDTH, HEIGHT, LEFT, TOP = 900, 560, 70, 50
PLOT_W, PLOT_H, BAR = 780, 350, 34
COLOURS = ("#2b6cb0", "#c05621", "#718096", "#b7791f", "#6b46c1", "#2f855a")


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

    limit = TOP + PLOT_H * (1 - plans.limit / 1e9 / most)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(plans.model.name)} on '
        f"{plans.cluster.gpus:,} GPUs: seconds of a step (across), GB of a GPU (up)</text>",
        f'<line x1="{LEFT}" x2="{LEFT + PLOT_W}" y1="{limit:.1f}" y2="{limit:.1f}" stroke="#c53030"'
        ' stroke-dasharray="5 4"/>',
        f'<text x="{LEFT + 4}" y="{limit - 4:.1f}" fill="#c53030">'
        f"{plans.limit / 1e9:.1f} GB</text>",
    ]
    for n in range(len(plans.layouts)):
        if seconds[n] <= high and gb[n] <= most:
            x, y = place(n)
            fill = "#2b6cb0" if plans.fits[n] else "none"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="#2b6cb0">'
                f"<title>{escape(plans.layouts[n].flags())}: {seconds[n]:.2f} s, {gb[n]:.1f} GB"
                "</title></circle>"
            )
    front = [place(n) for n in pareto(plans) if seconds[n] <= high and gb[n] <= most]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    parts.append(f'<polyline points="{points}" fill="none" stroke="#2f855a" stroke-width="1.5"/>')
    for share in (0.0, 0.5, 1.0):
        at = low * (high / low) ** share
        parts.append(f'<text x="{LEFT + PLOT_W * share:.0f}" y="{TOP + PLOT_H + 18}" '
                     f'text-anchor="middle">{at:.3g} s</text>')  # fmt: skip
    best = plans.best(1)
    if best:
        parts += _bar(plans, best[0], TOP + PLOT_H + 50)
    return "\n".join([*parts, "</svg>", ""])


def _bar(plans: Plans, n: int, y: float) -> list[str]:
    told = breakdown(plans, n)
    parts = [f'<text x="{LEFT}" y="{y - 8:.0f}">the best step, {told.step:.2f} s</text>']
    x = float(LEFT)
    for row, (colour, key) in enumerate(zip(COLOURS, TERMS, strict=True)):
        width = PLOT_W * told.seconds[key] / told.step
        parts.append(f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{BAR}" '
                     f'fill="{colour}"><title>{TERMS[key]}</title></rect>')  # fmt: skip
        at = LEFT + 270 * (row % 3), y + BAR + 20 + 20 * (row // 3)
        parts.append(f'<rect x="{at[0]}" y="{at[1] - 9:.0f}" width="10" height="10" '
                     f'fill="{colour}"/><text x="{at[0] + 14}" y="{at[1]:.0f}">{TERMS[key]}: '
                     f"{told.seconds[key]:.3f} s</text>")  # fmt: skip
        x += width
    return parts
