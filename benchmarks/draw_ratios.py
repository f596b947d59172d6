# SPDX-License-Identifier: Apache-2.0
"""Draw docs/ratios.svg: every measured ratio of docs/performance.md, a dot each, and print ranges.

    python benchmarks/draw_ratios.py            writes docs/ratios.svg and prints a line a table
    python benchmarks/draw_ratios.py --check    writes nothing; exits 1 where the picture differs

A ratio is a bold number of a table there. All are drawn as speeds: above 1, Weft is faster. A table
of seconds that prints Weft / peer is turned over.
"""

import argparse
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "ratios.svg"
# heading of performance.md, label, against what, whether its ratios are of seconds, Weft / peer
TABLES = [
    ("Training steps on one rank", "one rank", "torch", False),
    ("Tensor parallelism and shared memory", "tensor parallel 2", "torch DTensor", False),
    ("Pipeline schedules", "pipeline 2", "torch pipelining", True),
    ("ZeRO", "ZeRO 1 and 3", "FSDP2", False),
    ("Checkpoints", "save, load", "torch DCP", False),
]
TICKS = [0.8, 1, 1.25, 1.5, 2, 3, 4, 5]
WIDTH, LEFT, RIGHT, TOP, ROW = 900, 290, 120, 58, 34
INK, QUIET, RULE, DOT = "#222222", "#666666", "#d8d8d8", "#1d4f91"


def ratios(page: str) -> dict[str, list[float]]:
    """Return {label: the ratios of its table, as speeds}. Raises ValueError for a table without."""
    found: dict[str, list[float]] = {}
    for heading, label, _, seconds in TABLES:
        text = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        rows: list[str] = []
        for line in text.splitlines():
            if line.startswith("|"):
                rows.append(line)
            elif rows:
                break  # the first table is the one against the peer
        bold = [float(n) for row in rows for n in re.findall(r"\*\*([\d.]+)\*\*", row)]
        if not bold:
            raise ValueError(f"{PAGE.name}: the table of {heading!r} has no bold ratio")
        found[label] = [1 / n if seconds else n for n in bold]
    return found


def place(ratio: float) -> float:
    """Return the x of a ratio, on a logarithmic axis."""
    low, high = math.log(TICKS[0]), math.log(TICKS[-1])
    return LEFT + (math.log(ratio) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def draw(found: dict[str, list[float]]) -> str:
    """Return the picture: a row a table, a dot a ratio, the range at its end."""
    bottom = TOP + ROW * len(found)
    height = bottom + 48

    def text(x: float, y: float, words: str, colour: str = INK, anchor: str = "start") -> str:
        at = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"'
        return f"<text {at}>{words}</text>"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="DejaVu Sans, Arial, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(16, 26, "Speed of Weft over its peer, on 2 CPU cores: each dot is one measured case"),
    ]
    for tick in TICKS:
        x = place(tick)
        colour, wide = (INK, 1.4) if tick == 1 else (RULE, 0.8)
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 14}" y2="{bottom}" stroke="{colour}" '
            f'stroke-width="{wide}"/>'
        )
        lines.append(text(x, bottom + 18, f"{tick:g}", QUIET, "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(text(middle, bottom + 38, "times as fast as the peer (1: equal)", QUIET, "middle"))
    for row, (label, values) in enumerate(found.items()):
        y = TOP + ROW * row + 8
        against = next(peer for _, name, peer, _ in TABLES if name == label)
        lines.append(text(16, y + 4, label))
        lines.append(text(LEFT - 16, y + 4, against, QUIET, "end"))
        lines += [
            f'<circle cx="{place(value):.1f}" cy="{y}" r="5" fill="{DOT}" fill-opacity="0.55"/>'
            for value in sorted(values)
        ]
        lines.append(text(WIDTH - RIGHT + 14, y + 4, span(values)))
    return "\n".join([*lines, "</svg>", ""])


def span(values: list[float]) -> str:
    """Write the least and the largest of some ratios."""
    return f"{min(values):.2f} to {max(values):.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    found = ratios(PAGE.read_text())
    picture = draw(found)
    for label, values in found.items():
        print(f"{label:<18} {span(values)}  ({len(values)} ratios)")
    if check:
        return int(picture != PICTURE.read_text())
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
