# SPDX-License-Identifier: Apache-2.0
"""Draw plans: memory against time, with its Pareto front."""

from pathlib import Path
from typing import Any

import numpy as np

from forecast.planner.search import Plans
from tools.pictures.style import DASHES, PALETTE, axes_at, page

LEFT, WIDTH = 0.8, 8.0  # inches
POINT, FRONT, LIMIT = PALETTE[0], PALETTE[2], PALETTE[6]


def pareto(plans: Plans) -> list[int]:
    """Return the layouts that no other beats in both time and memory, fastest first."""
    front, least = [], float("inf")
    for n in np.lexsort((plans.bytes, plans.times.step)):
        if plans.bytes[n] < least:
            front.append(int(n))
            least = float(plans.bytes[n])
    return front


def draw(plans: Plans, path: Path) -> None:
    """Draw each layout as a point, filled where it fits.

    Raises ValueError for a name that is neither a .png nor an .svg.
    """
    title = f"{plans.model.name} on {plans.cluster.gpus:,} GPUs"
    fits = f"{int(plans.fits.sum()):,} of {len(plans.layouts):,} layouts fit; filled: it fits"
    subtitle = f"{fits}; the line: none is faster with less"
    with page(path, LEFT + WIDTH + 0.4, 5.1, title, subtitle) as figure:
        _draw_layouts(axes_at(figure, LEFT, 0.8, WIDTH, 3.6), plans)


def _draw_layouts(axes: Any, plans: Plans) -> None:
    """Draw memory against time, without layouts far slower or larger than the others."""
    seconds, gb = plans.times.step, plans.bytes / 1e9
    low, high = float(seconds.min()), float(min(seconds.max(), 4 * seconds.min()))
    most = float(min(gb.max(), 2.5 * plans.limit / 1e9))
    shown = (seconds <= high) & (gb <= most)
    for fits, fill in ((plans.fits & shown, POINT), (~plans.fits & shown, "none")):
        axes.scatter(seconds[fits], gb[fits], s=14, facecolor=fill, edgecolor=POINT, gid="layouts")
    front = [n for n in pareto(plans) if shown[n]]
    axes.plot(seconds[front], gb[front], color=FRONT, gid="front")
    axes.axhline(plans.limit / 1e9, color=LIMIT, linewidth=1, linestyle=DASHES)
    axes.annotate(
        f"a GPU has {plans.limit / 1e9:.1f} GB", (1, plans.limit / 1e9), (0, 3), color=LIMIT,
        xycoords=axes.get_yaxis_transform(), textcoords="offset points", ha="right",
    )  # fmt: skip
    ticks = low * (high / low) ** np.linspace(0, 1, 5)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.02, high * 1.02)
    axes.set_ylim(0, 1.04 * most)
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="seconds of a step, on a logarithmic axis", ylabel="GB of a GPU")
    axes.grid()
