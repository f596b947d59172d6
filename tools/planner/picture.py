# SPDX-License-Identifier: Apache-2.0
"""Draw plans: memory against time with its Pareto front, where the best step goes, and what its
pipeline ranks do when.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tools.pictures.style import DASHES, INK, KINDS, PALETTE, RULE, axes_at, page
from tools.planner.search import Plans
from tools.planner.table import TERMS, breakdown, timeline

LEFT, WIDTH, ROW = 0.8, 8.0, 0.16  # inches; ROW: of a pipeline rank
MOST_BOXES = 6000  # more are too many to see
POINT, FRONT, LIMIT = PALETTE[0], PALETTE[2], PALETTE[6]
PARTS = (*PALETTE, INK, RULE)


def pareto(plans: Plans) -> list[int]:
    """Return the layouts that no other beats in both time and memory, fastest first."""
    front, least = [], float("inf")
    for n in np.lexsort((plans.bytes, plans.times.step)):
        if plans.bytes[n] < least:
            front.append(int(n))
            least = float(plans.bytes[n])
    return front


def draw(plans: Plans, path: Path) -> None:
    """Draw each layout as a point, filled where it fits; below them the best step.

    Raises ValueError for a name that is neither a .png nor an .svg.
    """
    best = plans.best(1)
    count = drawn_micro_batches(plans, best[0]) if best else 0
    rows = plans.layouts[best[0]].pp if count else 0
    title = f"{plans.model.name} on {plans.cluster.gpus:,} GPUs"
    fits = f"{int(plans.fits.sum()):,} of {len(plans.layouts):,} layouts fit; filled: it fits"
    tall = 5.1 + (1.5 if best else 0) + (0.9 + ROW * rows if rows else 0)
    subtitle = f"{fits}; the line: none is faster with less"
    with page(path, LEFT + WIDTH + 0.4, tall, title, subtitle) as figure:
        _draw_layouts(axes_at(figure, LEFT, 0.8, WIDTH, 3.6), plans)
        if best:
            _draw_parts(axes_at(figure, LEFT, 5.2, WIDTH, 0.35), plans, best[0])
        if rows:
            axes = axes_at(figure, LEFT, 6.65, WIDTH, ROW * rows)
            _draw_step(axes, plans, best[0], count)


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


def _draw_parts(axes: Any, plans: Plans, n: int) -> None:
    """Draw where the time of a step goes, as one bar."""
    parts, begin = breakdown(plans, n), 0.0
    for colour, (key, what) in zip(PARTS, TERMS.items(), strict=True):
        seconds = parts.seconds[key]
        axes.barh(0, seconds, left=begin, color=colour, label=f"{what}: {seconds:.3f} s")
        begin += seconds
    axes.set_title(f"the best step, {parts.step:.2f} s", loc="left", fontsize=8)
    axes.set_xlim(0, parts.step)
    axes.axis("off")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=3, fontsize=7)


def drawn_micro_batches(plans: Plans, n: int) -> int:
    """Return how many of a step's micro-batches are drawn: as many as can be seen, 0 of none."""
    each = plans.layouts[n]
    most = MOST_BOXES // (3 * each.pp * each.virtual) // each.pp * each.pp
    return min(each.micro_batches, most)


def _draw_step(axes: Any, plans: Plans, n: int, count: int) -> None:
    """Draw a step of `count` micro-batches: a row for each pipeline rank, then sums and update."""
    each, t = plans.layouts[n], plans.times
    ranks = timeline(plans, n, count).ranks
    end = max(spans[-1].end for spans in ranks)
    sums, update = float(t.sums[n]), float(t.update[n] + t.carried[n])
    for row, spans in enumerate(ranks):
        for kind, colour in KINDS.items():
            own = [(s.begin, s.end - s.begin) for s in spans if s.action.kind == kind]
            look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.2}
            axes.broken_barh(own, (row, 0.9), facecolor=colour, gid=f"pp{row}-{kind}", **look)
        for what, begin, seconds, colour in (
            ("sums", end, sums, PALETTE[4]),
            ("update", end + sums, update, PALETTE[5]),
        ):
            name = f"pp{row}-{what}"
            axes.broken_barh([(begin, seconds)], (row, 0.9), facecolor=colour, gid=name)
    part = "all" if count == each.micro_batches else f"{count} of"
    axes.set_title(
        f"the best step with {part} its {each.micro_batches:,} micro-batches: F blue, B orange, "
        "W green, then sums of gradients yellow, the optimizer light blue",
        loc="left", fontsize=8,
    )  # fmt: skip
    axes.set(xlim=(0, end + sums + update), ylim=(len(ranks), 0), xlabel="seconds")
    some = range(0, len(ranks), max(1, len(ranks) // 16))
    axes.set_yticks([row + 0.45 for row in some], [f"pp {row}" for row in some])
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
