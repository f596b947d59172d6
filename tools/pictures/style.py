# SPDX-License-Identifier: Apache-2.0
"""The common style of all pictures: pages in inches, fonts, colours, and reproducible files.

A picture drawn again by the same matplotlib is the same file, bit for bit.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.files.owned import refuse
from training.files.untrusted import open_plain

# of runs, ranks and parts, in this order: distinct under the common colour blindnesses
PALETTE = (
    "#1d4f91", "#d26a14", "#4a9a78", "#8d3b72", "#c9a227", "#5b8db8", "#a94438", "#6b6b6b",
)  # fmt: skip
KINDS = dict(zip("FBW", PALETTE, strict=False))  # of a pipeline's actions
IDLE, GRID, RULE, QUIET, INK = "#f1f0ed", "#e6e6e6", "#9a9a9a", "#666666", "#222222"
DASHES = (0, (4, 3))
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "xtick.labelcolor": QUIET,
    "xtick.major.size": 3,
    "ytick.color": RULE,
    "ytick.labelcolor": QUIET,
    "ytick.major.size": 3,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "legend.handlelength": 1.4,
    "legend.handleheight": 0.9,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.5,
    "svg.fonttype": "none",  # text stays text: small, searchable, for screen readers
    "svg.hashsalt": "weft",  # the same picture is the same file
}


def check_name(path: Path) -> None:
    """Raise ValueError unless a picture may be written to a path: it ends in .png or .svg, and an
    existing file is a picture that matplotlib drew.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: a picture must be a .png or .svg file")
    refuse("", path, _drawn, "a picture that matplotlib drew")


def _drawn(path: Path) -> bool:
    """Return whether a file begins as those of matplotlib do, or is empty."""
    try:
        with open_plain(path) as file:
            head = file.read(4096)
    except OSError:
        return False
    return not head or b"Matplotlib version" in head or b'id="figure_1"' in head


@contextmanager
def page(
    path: Path, width: float, height: float, title: str, subtitle: str = "", *, dpi: int = 200
) -> Iterator[Any]:
    """Yield a matplotlib Figure of this size in inches with its title, and write it to `path`.

    Raises ValueError for a name that is neither a .png nor an .svg.
    """
    check_name(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=dpi)
        left = 0.3 / width
        bold: Any = {"fontsize": 12, "weight": "bold"}
        plain: Any = {"fontsize": 8.5, "color": QUIET}
        for up, text, font in ((0.32, title, bold), (0.54, subtitle, plain)):
            figure.text(left, 1 - up / height, text, parse_math=False, **font)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        still = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(path, metadata=still)


def axes_at(figure: Any, left: float, top: float, width: float, height: float, **more: Any) -> Any:
    """Add axes to a page: inches from its left and upper edge, and their size in inches."""
    wide, tall = figure.get_size_inches()
    box = (left / wide, 1 - (top + height) / tall, width / wide, height / tall)
    return figure.add_axes(box, **more)


def lighter(colour: str, share: float) -> str:
    """Mix a share of white into a colour."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


def shapes(picture: Path) -> list[str]:
    """Return the outlines, places and words of an SVG: equal where two pictures look alike."""
    return re.findall(r'(?: d="[^"]*"| x="[^"]*"| y="[^"]*"|>[^<>\s][^<>]*<)', picture.read_text())
