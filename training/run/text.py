# SPDX-License-Identifier: Apache-2.0
"""Write bytes and tables for a terminal."""

from collections.abc import Sequence


def in_units(value: float) -> str:
    """Return bytes as text in decimal units, as memory and networks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of a table with their columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]
