# SPDX-License-Identifier: Apache-2.0
"""Ask a line of a CSV for a column's text, number or count; name the line where it has none."""

import math
from dataclasses import dataclass

from tools.planner.known import DEEPEST, MOST


class RowError(ValueError):
    """A row that cannot be read: the text names the file, the line, the column and the value."""


@dataclass(frozen=True)
class Line:
    """A line of a CSV, asked for by column."""

    file: str
    number: int
    values: dict[str, str]

    def wrong(self, column: str, rule: str) -> RowError:
        value = self.values.get(column)
        return RowError(f"{self.file}, line {self.number}, {column}: {value!r} {rule}")

    def text(self, column: str) -> str:
        value = (self.values.get(column) or "").strip()
        return "" if value.lower() in ("nan", "none", "-", "na", "n/a") else value

    def number_of(self, column: str, default: float = math.nan) -> float:
        """Return a column's number, or the default where it is empty. Raises RowError."""
        value = self.text(column)
        if not value:
            return default
        try:
            number = float(value)
        except ValueError:
            raise self.wrong(column, "is no number") from None
        if not math.isfinite(number) or number < 0:
            raise self.wrong(column, "must be a finite number of at least 0")
        return number

    def measured(self, column: str, default: float = math.nan) -> float:
        """Return a measured number: NaN where it is none, as no prediction needs it."""
        try:
            return self.number_of(column, default)
        except RowError:
            return math.nan

    def deep(self, column: str, default: float = math.nan) -> int:
        """Return a pipeline's ranks. Raises RowError, also where there are more than DEEPEST."""
        stages = self.count(column, default)
        if stages > DEEPEST:
            raise self.wrong(column, f"must be at most {DEEPEST:,}")
        return stages

    def count(self, column: str, default: float = math.nan) -> int:
        """Return a column's whole number of at least 1. Raises RowError, also where it is empty."""
        number = self.number_of(column, default)
        if math.isnan(number):
            raise self.wrong(column, "is needed, and the other columns do not tell it")
        if number != int(number) or number < 1:
            raise self.wrong(column, "must be a whole number of at least 1")
        if number > MOST:
            raise self.wrong(column, f"must be at most {MOST:,}")
        return int(number)
