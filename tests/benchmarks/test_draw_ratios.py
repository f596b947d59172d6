# SPDX-License-Identifier: Apache-2.0
"""docs/ratios.svg is what benchmarks/draw_ratios.py makes of docs/performance.md."""

import pytest

from benchmarks import draw_ratios
from tools.pictures.style import shapes


def test_the_picture_is_the_pages_ratios(tmp_path):
    found = draw_ratios.ratios(draw_ratios.PAGE.read_text())
    draw_ratios.draw(found, tmp_path / "a.svg")
    assert shapes(tmp_path / "a.svg") == shapes(draw_ratios.PICTURE)
    text = draw_ratios.PICTURE.read_text()
    groups = [text.split(f'<g id="{label}, {peer}">')[1].split("</g>")[0] for label, peer in found]
    dots = [group.count("<use") for group in groups]
    assert dots == [len(values) for values in found.values()] and sum(dots) > 40
    # a range that is printed the same: a dot lies elsewhere
    found["one rank", "torch, eager"][0] *= 1.01
    draw_ratios.draw(found, tmp_path / "b.svg")
    assert shapes(tmp_path / "b.svg") != shapes(draw_ratios.PICTURE)


def test_seconds_are_turned_over_and_a_table_without_ratios_is_named():
    page = "".join(
        f"\n## {heading}\n\n| a |\n| 1 / 2 **0.5** |\n\n| late |\n| **9** |\n"
        for heading, *_ in draw_ratios.TABLES
    )
    found = draw_ratios.ratios(page)
    assert found["pipeline 2", "torch pipelining"] == [2.0]
    assert found["one rank", "eager, compiled"] == [0.5]
    assert draw_ratios.span([2.0, 1.5]) == "1.50 to 2.00" and draw_ratios.span([1.5]) == "1.50"
    with pytest.raises(ValueError, match="'ZeRO' has no bold ratio"):
        draw_ratios.ratios(page.replace("## ZeRO", "## Zero"))
