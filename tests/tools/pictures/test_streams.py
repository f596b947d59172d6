# SPDX-License-Identifier: Apache-2.0
"""Streams of any length are cut into lines that fit the page, and all words stay on it."""

import random
from contextlib import contextmanager

import pytest
from matplotlib.text import Text

from forecast.explainer.timeline import COMPUTE, Box, Part, Streams
from tools.pictures import streams
from tools.pictures.streams import UNITS, cut, draw
from tools.pictures.style import page

LAYERS = ("layers.0.attention.qkv", "layers.11.mlp.a_very_long_name_of_a_layer", "head", "bucket 9")
ACTIONS = ("F micro-batch 3", "update", "the name of an action")


def some(seed):
    """Draw a step at random: boxes of compute one after another, transfers anywhere."""
    rng = random.Random(seed)
    boxes, parts, at = [], [], 0.0
    for n in range(rng.choice([1, 5, 120])):
        if n == 0 or rng.random() < 0.1:
            parts.append(Part(rng.choice(ACTIONS), at))
        end = at + rng.choice([0.1, 0.35, 1.0, 1.0])
        kind = rng.choice(["F", "B", "W", "other", "wait"])
        boxes.append(Box(COMPUTE, at, end, kind, "matmul", rng.choice(LAYERS)))
        at = end
    for _ in range(rng.choice([0, 4, 40])):
        begin, end = sorted((rng.uniform(0, at), rng.uniform(0, at)))
        stream = rng.choice(["tp", "cp", "dp_cp", "pp", "world", "another"])
        kind = rng.choice(["hidden", "waited for"])
        boxes.append(Box(stream, begin, end, kind, "gather", rng.choice(LAYERS)))
    return Streams(rng.choice(["", "pipeline rank 3"]), parts, boxes, at)


@pytest.mark.parametrize("seed", range(8))
def test_lines_hold_all_of_a_step(seed):
    step = some(seed)
    lines = cut(step)
    assert lines[0].begin == 0 and lines[-1].end == step.end
    assert all(a.end == b.begin for a, b in zip(lines, lines[1:], strict=False))
    assert all(0 < line.end - line.begin <= UNITS + 1e-9 for line in lines)
    computed = {box.end for box in step.boxes if box.stream == COMPUTE}
    assert all(line.end in computed for line in lines)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(4))
def test_all_words_are_on_the_page_and_in_their_boxes(seed, tmp_path, monkeypatch):
    seen = {}

    @contextmanager
    def watched(*arguments, **more):
        with page(*arguments, **more) as figure:
            yield figure
            figure.draw_without_rendering()
            seen["all"] = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
            seen["page"] = figure.bbox
            for axes in figure.axes:
                words = [t for t in axes.findobj(Text) if t.get_fontsize() == 6.5 and t.get_text()]
                rows = axes.get_window_extent()
                for text in words:
                    box = text.get_window_extent()
                    assert rows.x0 <= box.x0 and box.x1 <= rows.x1 + 1, text.get_text()
                    seen["words"] = seen.get("words", 0) + 1

    monkeypatch.setattr(streams, "page", watched)
    draw([some(seed), some(6)], tmp_path / "a.svg", "x", "y")
    assert seen["page"].x0 <= seen["all"].x0 and seen["all"].x1 <= seen["page"].x1
    assert seen["page"].y0 <= seen["all"].y0 and seen["all"].y1 <= seen["page"].y1
    assert seen["words"] > 20
