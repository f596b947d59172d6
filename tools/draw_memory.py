# SPDX-License-Identifier: Apache-2.0
"""Draw the memory of a rank over a step, as stacked bars: a bar an action, a colour a kind.

    WORLD_SIZE=8 python pretrain_llama.py --dry-run --memory-picture memory.svg FLAG...

pretrain_llama.py starts this with the file to write, and passes the result of
forecast/memory_picture.py on standard input.
"""

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from tools.pictures.style import GRID, INK, PALETTE, QUIET, RULE, axes_at, page
from training.files.untrusted import parse_json, sentence

USAGE = "usage: pretrain_llama.py --dry-run --memory-picture FILE FLAG...; it starts this itself"
# from the bottom, which is there all the time: {group: kinds that --dry-run prints}
GROUPS = {
    "weights": ("parameters", "gathered weights", "weights in float8"),
    "optimizer state": ("masters", "moments"),
    "gradients": ("gradients", "unsharded gradients"),
    "workspaces": ("workspaces", "other state"),
    "activations": ("activations", "messages"),
    "logits": ("logits",),
    "working memory": ("working memory",),
}
COLOURS = (PALETTE[0], PALETTE[5], PALETTE[2], PALETTE[7], PALETTE[1], PALETTE[4], PALETTE[3])
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
WIDE, LEFT, TOP, ACROSS, TALL, BELOW = 9.0, 0.75, 1.0, 8.0, 3.0, 0.6  # inches
LETTER, LINE = 0.085, 0.15  # inches: the width of a letter of an action's name, and a line's height


def draw(path: Path, record: dict[str, Any]) -> None:
    """Draw a record of forecast/memory_picture.py as a .png or an .svg, by the path's suffix."""
    names = [name for name, _ in record["steps"]]
    kinds = [
        {group: sum(each.get(kind, 0) for kind in parts) for group, parts in GROUPS.items()}
        for _, each in record["steps"]
    ]
    totals = [sum(each.values()) for each in kinds]
    most = max(totals)
    size, unit = next(((s, u) for s, u in UNITS if most >= s), UNITS[-1])
    turned = max(map(len, names)) * LETTER > ACROSS / len(names)
    below = BELOW + 0.35 * turned
    with page(path, WIDE, TOP + TALL + below, record["title"], record["subtitle"]) as figure:
        axes = axes_at(figure, LEFT, TOP, ACROSS, TALL)
        axes.grid(axis="y")
        floor = [0.0] * len(names)
        for group, colour in zip(GROUPS, COLOURS, strict=True):
            heights = [each[group] / size for each in kinds]
            if not any(heights):
                continue
            look: dict[str, Any] = {"color": colour, "edgecolor": "white", "linewidth": 0.3}
            bars = axes.bar(range(len(names)), heights, 1.0, floor, label=group, **look)
            for name, bar in zip(names, bars, strict=True):
                bar.set_gid(f"{group}-{name}".replace(" ", "-"))
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        _mark_peak(axes, totals.index(most), most / size, record["peak"])
        axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(0, 1.12 * most / size), ylabel=unit)
        _name_actions(axes, names, turned)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.02), ncols=len(GROUPS))


def _mark_peak(axes: Any, at: int, value: float, words: str) -> None:
    """Mark the fullest action with its bytes; the words are on the side with more room."""
    axes.axhline(value, color=RULE, linewidth=0.8, linestyle=(0, (4, 3)))
    count = axes.dataLim.x1 - axes.dataLim.x0
    left = at > count / 2
    axes.annotate(
        words, (at, value), (-6 if left else 6, 5), textcoords="offset points",
        ha="right" if left else "left", color=INK, weight="bold",
    )  # fmt: skip
    axes.plot([at], [value], "v", color=INK, markersize=5, clip_on=False, zorder=4)


def _name_actions(axes: Any, names: list[str], turned: bool) -> None:
    """Write the actions' names under the bars; turned: rotated, and only as many as fit."""
    every = math.ceil(LINE * len(names) / ACROSS) if turned else 1
    last = len(names) - 1
    some = [i for i in range(len(names)) if i == last or (i % every == 0 and last - i >= every)]
    axes.set_xticks(some, [names[i] for i in some], rotation=90 if turned else 0)
    axes.tick_params(axis="x", length=0)
    axes.spines["bottom"].set_color(GRID)
    what = "F0.1: micro-batch 0 in chunk 1" if "." in names[0] else "F0: micro-batch 0"
    axes.set_xlabel(f"actions of a step, in order; {what}, forward", color=QUIET)


def main() -> int:
    """Read the record, draw it; return the exit status."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        draw(Path(sys.argv[1]), parse_json(sys.stdin.read(), "standard input"))
    except (ValueError, OSError) as error:
        print(sentence(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
