# SPDX-License-Identifier: Apache-2.0
"""docs/ratios.svg is what benchmarks/draw_ratios.py makes of docs/performance.md."""

import re

import pytest

from benchmarks import draw_ratios


def test_the_picture_is_the_pages_ratios():
    found = draw_ratios.ratios(draw_ratios.PAGE.read_text())
    assert draw_ratios.PICTURE.read_text() == draw_ratios.draw(found)
    dots = re.findall("<circle", draw_ratios.PICTURE.read_text())
    assert len(dots) == sum(map(len, found.values())) > 40


def test_seconds_are_turned_over_and_a_table_without_ratios_is_named():
    page = "".join(
        f"\n## {heading}\n\n| a |\n| 1 / 2 **0.5** |\n\n| late |\n| **9** |\n"
        for heading, *_ in draw_ratios.TABLES
    )
    found = draw_ratios.ratios(page)
    assert found["pipeline 2"] == [2.0] and found["one rank"] == [0.5]
    with pytest.raises(ValueError, match="'ZeRO' has no bold ratio"):
        draw_ratios.ratios(page.replace("## ZeRO", "## Zero"))
