# SPDX-License-Identifier: Apache-2.0
"""Draw docs/ratios.svg, a dot for each measured ratio of docs/performance.md, and print ranges.

    python benchmarks/draw_ratios.py            writes docs/ratios.svg, prints a line for each table
    python benchmarks/draw_ratios.py --check    writes nothing; exits 1 if the picture differs

Ratios are the bold numbers of that page's tables. All are drawn as speeds: above 1, Weft is faster.
Ratios of a table of seconds, Weft / peer, are inverted.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script, find tools

from tools.pictures.style import PALETTE, QUIET, axes_at, page, shapes  # noqa: E402

PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "ratios.svg"
# heading of performance.md, label, peer, whether its ratios are of seconds, Weft / peer
TABLES = [
    ("Training steps on one rank", "one rank", "torch, eager", False),
    ("One rank beside torch.compile", "one rank", "eager, compiled", False),
    ("Tensor parallelism and shared memory", "tensor parallel 2", "torch DTensor", False),
    ("Pipeline schedules", "pipeline 2", "torch pipelining", True),
    ("ZeRO", "ZeRO 1 and 3", "FSDP2", False),
    ("Checkpoints", "save, load", "torch DCP", False),
]
TICKS = [0.8, 1, 1.25, 1.5, 2, 3, 4, 5]


Ratios = dict[tuple[str, str], list[float]]  # by label and peer


def ratios(page: str) -> Ratios:
    """Return the ratios of each table, as speeds. Raises ValueError for a table without any."""
    found: Ratios = {}
    for heading, label, peer, seconds in TABLES:
        text = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        rows: list[str] = []
        for line in text.splitlines():
            if line.startswith("|"):
                rows.append(line)
            elif rows:
                break  # the first table is the comparison with the peer
        bold = [float(n) for row in rows for n in re.findall(r"\*\*([\d.]+)\*\*", row)]
        if not bold:
            raise ValueError(f"{PAGE.name}: the table of {heading!r} has no bold ratio")
        found[label, peer] = [1 / n if seconds else n for n in bold]
    return found


def draw(found: Ratios, path: Path) -> None:
    """Draw a row for each table: a dot for each ratio, and the range at its end."""
    title = "Speed of Weft over its peer, on a CPU"
    about = "each dot is one measured case on 2 cores; of eager, compiled on another CPU"
    tall = 1.4 + 0.34 * len(found)
    with page(path, 8.4, tall, title, about) as figure:
        axes = axes_at(figure, 2.5, 0.75, 4.7, 0.34 * len(found))
        for row, ((label, peer), values) in enumerate(found.items()):
            look = {"color": PALETTE[0], "markersize": 6, "alpha": 0.55, "markeredgewidth": 0}
            axes.plot(sorted(values), [row] * len(values), "o", gid=f"{label}, {peer}", **look)
            where = {"transform": axes.get_yaxis_transform(), "va": "center"}
            axes.text(-0.468, row, label, **where)
            axes.text(-0.03, row, peer, color=QUIET, ha="right", **where)
            axes.text(1.03, row, span(values), **where)
        axes.axvline(1, color=QUIET, linewidth=1)
        axes.set_xscale("log")
        axes.set(xlim=(TICKS[0], TICKS[-1]), ylim=(len(found) - 0.5, -0.5), yticks=[])
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("times as fast as the peer (1: equal)")
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)


def span(values: list[float]) -> str:
    """Return the least and the largest of some ratios as text, or the only one."""
    ends = sorted({f"{min(values):.2f}", f"{max(values):.2f}"}, key=float)
    return " to ".join(ends)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    found = ratios(PAGE.read_text())
    for (label, peer), values in found.items():
        print(f"{label:<18} {peer:<17} {span(values)}  ({len(values)} ratios)")
    if not check:
        draw(found, PICTURE)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        draw(found, Path(folder) / "ratios.svg")
        return int(shapes(Path(folder) / "ratios.svg") != shapes(PICTURE))


if __name__ == "__main__":
    sys.exit(main())
