# SPDX-License-Identifier: Apache-2.0
"""The one style of all pictures: letters, colours, titles, and files that repeat bit for bit.

tools/pictures/schedule.py draws schedules in it and holds its base, as mpu imports no tool.
"""

from pathlib import Path
from typing import Any

from tools.pictures.schedule import COLOURS as KINDS
from tools.pictures.schedule import INK, QUIET, RULE, STYLE

__all__ = ["GRID", "INK", "PALETTE", "QUIET", "RULE", "STYLE", "check_name", "save", "write_title"]

# of runs, ranks and parts, in this order: distinct under the common colour blindnesses
PALETTE: tuple[str, ...] = (KINDS["F"], KINDS["B"], KINDS["W"])
PALETTE += ("#8d3b72", "#c9a227", "#5b8db8", "#a94438", "#6b6b6b")
GRID = "#e6e6e6"
TITLE, SUBTITLE = 12.0, 8.5  # points


def check_name(path: Path) -> None:
    """Raise ValueError unless a picture's name ends in .png or .svg."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: a picture is a .png or an .svg")


def write_title(figure: Any, left: float, top: float, title: str, subtitle: str = "") -> None:
    """Write title and subtitle from `left` (a share of the width), `top` inches below the edge."""
    height = figure.get_figheight()
    figure.text(left, 1 - top / height, title, fontsize=TITLE, color=INK, weight="bold")
    under = 1 - (top + 0.22) / height
    figure.text(left, under, subtitle, fontsize=SUBTITLE, color=QUIET)


def save(figure: Any, path: Path) -> None:
    """Write a picture; the same picture is the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    still = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=still)
