# SPDX-License-Identifier: Apache-2.0
"""The comparison of speeds has the right ratio, and its interval is the median's."""

import random

import pytest

from benchmarks.compare_speed import ORDERS, median_interval, row


def test_interval_of_known_samples() -> None:
    """Of 1 .. 9 a bootstrap median is 1 in 0.15% of the samples, and 2 or less in 3.1%."""
    assert median_interval([1.25] * 9) == (1.25, 1.25)
    assert median_interval([5, 3, 1, 2, 9, 8, 7, 6, 4]) == (2, 8)
    assert median_interval([3, 1, 2]) == (1, 3)
    assert median_interval([5, 3, 1, 2, 9, 8, 7, 6, 4], confidence=0.5) == (4, 6)


def test_interval_covers_the_median() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(300):
        low, high = median_interval([draw.gauss(1.0, 0.1) for _ in range(9)], resamples=500)
        held += low <= 1.0 <= high
    assert 0.90 < held / 300 < 0.99


def test_rows() -> None:
    base = [0.2, 0.25, 0.4]
    line, fell = row("tiny-fp32-1", {"base": base, "new": [0.1, 0.125, 0.2], "again": base})
    assert line.split(maxsplit=3)[:3] == ["tiny-fp32-1", "4096", "8192"]
    assert line.endswith("2.000 [2.000, 2.000]   1.000 [1.000, 1.000]") and not fell
    line, fell = row("tiny-fp32-1", {"base": base, "new": [0.21, 0.24, 0.41], "again": base})
    assert "0.976 [0.952, 1.042]" in line and not fell
    line, fell = row("tiny-fp32-1", {"base": base, "new": [0.21, 0.26, 0.41], "again": base})
    assert line.endswith("slower") and fell


@pytest.mark.parametrize("other", ["new", "again"])
def test_base_and_the_others_take_turns(other: str) -> None:
    first = [order.index("base") < order.index(other) for order in ORDERS]
    assert first == [True, False, True, False]
    assert all(sorted(order) == ["again", "base", "new"] for order in ORDERS)
