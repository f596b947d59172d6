#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw who imports whom: the rooms of the product on their floors, and the arrows between them.

    python tests/draw_imports.py                          draws docs/imports.svg
    python tests/draw_imports.py --out a.png              a .svg or a .png elsewhere
    python tests/draw_imports.py --files mpu/comm         prints the files of a room, a line each

Floors and rooms are those of tests/test_layering.py, which also proves that no arrow points up. An
arrow that follows from others (a room imports what it imports through another room, too) is pale.
"""

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script, find tests and tools

from tests.test_layering import FLOORS, PRODUCT, arrows, module_of, room_of  # noqa: E402
from tools.pictures.style import INK, PALETTE, QUIET, RULE, axes_at, page  # noqa: E402

PICTURE = ROOT / "docs" / "imports.svg"
WIDTH, FLOOR = 12.0, 0.62  # inches: of all floors, and from floor to floor
COLOURS = {"mpu": PALETTE[0], "model": PALETTE[2], "training": PALETTE[1],
           "forecast": PALETTE[5]}  # fmt: skip
Arrow = tuple[str, str]  # (the room that imports, the room that it imports)


def names() -> dict[str, str]:
    """Return {module: its file} of the product."""
    return {module_of(path): path.relative_to(ROOT).as_posix() for path in PRODUCT}


def between_rooms() -> Counter[Arrow]:
    """Count the imports from one room by another."""
    files = names()
    found: Counter[Arrow] = Counter()
    for module, others in arrows(PRODUCT).items():
        for other in others:
            here, there = room_of(files[module])[1], room_of(files[other])[1]
            found[here, there] += here != there
    return +found


def follows(arrow: Arrow, graph: Counter[Arrow]) -> bool:
    """Return whether a room reaches another through a third one, too."""
    begin, end = arrow
    seen, reached = set(), {b for a, b in graph if a == begin and b != end}
    while reached - seen:
        room = (reached - seen).pop()
        seen.add(room)
        reached |= {b for a, b in graph if a == room}
    return end in reached


def places(graph: Counter[Arrow]) -> dict[str, tuple[float, int]]:
    """Return {room: (x in inches, floor)}; on a floor, a room is near those that it imports."""
    found: dict[str, tuple[float, int]] = {}
    for floor, rooms in enumerate(FLOORS):
        below = {
            room: [found[there][0] for here, there in graph if here == room and there in found]
            for room in rooms
        }
        middle = {room: sum(xs) / len(xs) if xs else 0.0 for room, xs in below.items()}
        for n, room in enumerate(sorted(rooms, key=lambda room: (middle[room], room))):
            aside = 0.13 * (-1) ** floor if len(rooms) == 1 else 0.0  # a long arrow passes it
            found[room] = (WIDTH * ((n + 0.5) / len(rooms) + aside), floor)
    return found


def draw(path: Path) -> None:
    """Draw the rooms and the arrows. Raises ValueError for neither a .png nor an .svg."""
    from matplotlib.patches import FancyArrowPatch

    graph = between_rooms()
    at = places(graph)
    plain = [arrow for arrow in graph if not follows(arrow, graph)]
    title = f"Who imports whom: {len(at)} rooms on {len(FLOORS)} floors"
    said = f"dark: the {len(plain)} arrows that do not follow from others"
    tall = FLOOR * len(FLOORS)
    with page(path, WIDTH + 0.6, tall + 0.9, title, said) as figure:
        axes = axes_at(figure, 0.3, 0.75, WIDTH, tall)
        axes.set(xlim=(0, WIDTH), ylim=(-0.5, len(FLOORS) - 0.5))
        axes.axis("off")
        for floor in range(len(FLOORS)):
            axes.axhline(floor - 0.5, color=RULE, linewidth=0.3)
        for room, (x, floor) in at.items():
            colour = COLOURS.get(room.split("/")[0], QUIET)
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour}
            axes.text(x, floor, room, ha="center", va="center", bbox=box, color=INK, zorder=3)
        for arrow in sorted(graph):
            (x, floor), (to, under) = (at[room] for room in arrow)
            dark = arrow in plain
            bend = 0.12 if x == to and floor - under > 1 else 0.0
            axes.add_patch(
                FancyArrowPatch(
                    (x, floor - 0.24), (to, under + 0.24),
                    arrowstyle="-|>", mutation_scale=6, shrinkA=0, shrinkB=0,
                    connectionstyle=f"arc3,rad={bend}", gid=" imports ".join(arrow),
                    color=COLOURS.get(arrow[0].split("/")[0], QUIET),
                    alpha=0.9 if dark else 0.15, linewidth=0.9 if dark else 0.6,
                    zorder=2 if dark else 1,
                )
            )  # fmt: skip


def described(room: str) -> list[tuple[str, str]]:
    """Return (file, first line of its docstring) of the product's files below a folder."""
    at = (ROOT / room).resolve()
    found = []
    for path in sorted(PRODUCT):
        if path == at or at in path.parents:
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            found.append((path.relative_to(ROOT).as_posix(), said.split("\n")[0]))
    return found


def main(argv: list[str] | None = None) -> int:
    """Draw, or print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE, help="the .svg or .png (docs/)")
    parser.add_argument("--files", metavar="ROOM", help="print the files of a folder, a line each")
    args = parser.parse_args(argv)
    if args.files is not None:
        for name, said in described(args.files):
            print(f"{name:<44} {said}")
        return 0
    try:
        draw(args.out)
    except (ValueError, OSError) as error:
        print(f"draw_imports.py: {error}", file=sys.stderr)
        return 2
    print(f"drawn: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
