# SPDX-License-Identifier: Apache-2.0
"""docs/gpu_step.svg is what benchmarks/draw_gpu_step.py makes of docs/gpu-results.md."""

import pytest

from benchmarks import draw_gpu_step
from tools.pictures.style import shapes


def test_the_picture_is_of_the_pages_tables(tmp_path):
    text = draw_gpu_step.PAGE.read_text()
    draw_gpu_step.draw(text, tmp_path / "a.svg")
    assert shapes(tmp_path / "a.svg") == shapes(draw_gpu_step.PICTURE)
    assert "47,116 tokens/s, 58.2 % MFU, 51.7 GB" in draw_gpu_step.PICTURE.read_text()
    assert "| 39,431 |" in text
    draw_gpu_step.draw(text.replace("| 39,431 |", "| 38,431 |"), tmp_path / "b.svg")
    assert shapes(tmp_path / "b.svg") != shapes(draw_gpu_step.PICTURE)


def test_a_page_without_its_table_is_named():
    with pytest.raises(ValueError, match="no table that begins with the column 'kernels'"):
        draw_gpu_step.draw("\n| row | ms |\n|---|---|\n| a | 1 |\n", draw_gpu_step.PICTURE)
