# SPDX-License-Identifier: Apache-2.0
"""Draw the attention blocks of each context-parallel rank in a row of tokens, and print shares.

    python benchmarks/draw_attention.py --cp 4 --documents 64 --out causal.svg
    python benchmarks/draw_attention.py --cp 4 --documents 70,25,1,32 --window 16
    python benchmarks/draw_attention.py --all docs/attention

Queries go down, keys to the right. A block of attention has the colour of the rank that holds its
queries; the strip on the left shows which rank holds each token (mpu/layers/attention/shards.py).
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.layers.attention.shards import balance, context_blocks, pairs, shards
from tools.command_line import Parser, error_line
from tools.pictures.style import PALETTE, RULE, axes_at, page

MOST = 1 << 14  # most tokens of a row in a picture
DOCS = {"causal": (64,), "documents": (37, 1, 16, 10)}  # the pictures of docs/long_context.md


def draw(cp: int, documents: tuple[int, ...], window: int, path: Path) -> None:
    """Draw a row to a .png or an .svg, by the path's suffix.

    Raises ValueError for another suffix, or if the row does not divide over the ranks.
    """
    of_ranks, size = shards(cp, documents), sum(documents)
    key = (cp, documents, window)
    from matplotlib.patches import Patch, Polygon

    with page(path, 6.8, 5.9, heading(*key), caption(*key)) as figure:
        axes = axes_at(figure, 0.3, 0.72, 5.05, 5.05)
        axes.set_xlim(-0.06 * size, size)
        axes.set_ylim(size, 0)
        axes.set_aspect("equal")
        axes.axis("off")

        def fill(corners: Sequence[tuple[float, float]], rank: int, name: str) -> None:
            axes.add_patch(Polygon(corners, closed=True, linewidth=0.3, gid=name, **_look(rank)))

        for rank in range(cp):
            for number, ranges in enumerate(of_ranks[rank]):
                a, b, left, right = ranges.start, ranges.stop, -0.05 * size, -0.02 * size
                strip = [(left, a), (right, a), (right, b), (left, b)]
                fill(strip, rank, f"rank{rank}-holds{number}")
            for number, (q, kv, part) in enumerate(context_blocks(rank, cp, documents, window)):
                fill(_corners(q, kv, part), rank, f"rank{rank}-block{number}-{part}")
        for end in [0, *accumulate(documents)]:
            axes.plot([0, size], [end, end], color=RULE, linewidth=0.4, zorder=0)
            axes.plot([end, end], [0, size], color=RULE, linewidth=0.4, zorder=0)
        shares = _shares(cp, documents, window)
        legend = [Patch(**_look(r), label=f"rank {r}  {shares[r]:.1%}") for r in range(cp)]
        figure.legend(handles=legend, loc="center right", bbox_to_anchor=(0.98, 0.5))


def _look(rank: int) -> dict[str, Any]:
    alpha = max(0.25, 1.0 - 0.25 * (rank // len(PALETTE)))
    return {"facecolor": PALETTE[rank % len(PALETTE)], "edgecolor": "white", "alpha": alpha}


def _corners(q: range, kv: range, part: str) -> list[tuple[float, float]]:
    """Return the corners (key, query) of a block; a triangle's edge follows whole tokens."""
    if part == "all":
        return [(kv.start, q.start), (kv.stop, q.start), (kv.stop, q.stop), (kv.start, q.stop)]
    steps: list[tuple[float, float]] = []
    for i in range(len(q)):  # down the stairs, a token a step
        edge = kv.start + i + (part == "tril")
        steps += [(edge, q.start + i), (edge, q.start + i + 1)]
    side = kv.start if part == "tril" else kv.stop
    return [(side, q.start), *steps, (side, q.stop)]


def _shares(cp: int, documents: tuple[int, ...], window: int) -> list[float]:
    work = [pairs(context_blocks(rank, cp, documents, window)) for rank in range(cp)]
    return [each / sum(work) for each in work]


def heading(cp: int, documents: tuple[int, ...], window: int) -> str:
    """Return a title."""
    many = f"{len(documents)} documents" if len(documents) > 1 else "one document"
    looks = f", a window of {window}" if window else ""
    return f"Attention of {sum(documents)} tokens in {many} over {cp} ranks{looks}"


def caption(cp: int, documents: tuple[int, ...], window: int) -> str:
    """Return the balance as a line of text."""
    each = sum(documents) // cp
    busiest = balance(cp, documents, window)
    return f"{each} tokens a rank; the busiest rank's attention over the mean: {busiest:.3f}"


def table(cp: int, documents: tuple[int, ...], window: int) -> str:
    """Return a line for each rank: its share of the work, its blocks, the tokens that it holds."""
    lines = []
    for rank, ranges in enumerate(shards(cp, documents)):
        count = len(context_blocks(rank, cp, documents, window))
        share = _shares(cp, documents, window)[rank]
        first = "tokens " + " ".join(f"{r.start}-{r.stop - 1}" for r in ranges[:8])
        more = f" and {len(ranges) - 8} more" if len(ranges) > 8 else ""
        lines.append(f"rank {rank}: {share:.1%} of the work in {count} blocks, {first}{more}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags, print the shares, draw the picture; return the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--cp", type=int, default=4, help="context-parallel ranks (4)")
    parser.add_argument(
        "--documents", type=_lengths, default=(64,), metavar="N,N,...",
        help="tokens of each document of the row (64)",
    )  # fmt: skip
    parser.add_argument("--window", type=int, default=0, help="tokens that a query looks at (all)")
    parser.add_argument("--out", type=Path, help="the .svg or .png to write")
    parser.add_argument("--all", type=Path, metavar="DIR", help="draw the pictures of docs/ there")
    args = parser.parse_args(argv)
    try:
        if args.cp < 1 or args.window < 0:
            raise ValueError(f"--cp {args.cp} --window {args.window}: at least 1, and at least 0")
        for name, documents in (DOCS if args.all else {}).items():
            draw(4, documents, 0, args.all / f"{name}.svg")
            print(f"{name}: {caption(4, documents, 0)}")
        if not args.all:
            key = (args.cp, args.documents, args.window)
            print(heading(*key), caption(*key), table(*key), sep="\n")
            if args.out:
                draw(*key, args.out)
    except (ValueError, OSError) as error:
        print(error_line("draw_attention.py", error), file=sys.stderr)
        return 2
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    """Read "70,25,1"."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < len(part) < 8 for part in parts):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not lengths N,N,...")
    lengths = tuple(map(int, parts))
    if min(lengths) < 1 or sum(lengths) > MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]}: from 1 token each to {MOST} together")
    return lengths


if __name__ == "__main__":
    sys.exit(main())
