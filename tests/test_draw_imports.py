# SPDX-License-Identifier: Apache-2.0
"""docs/imports.svg is the graph of imports, and each of its arrows points down."""

import re

from tests import draw_imports
from tests.test_layering import FLOORS
from tools.pictures.style import shapes


def test_the_picture_in_docs_is_the_graph(tmp_path):
    """After a change of rooms: python tests/draw_imports.py draws it again."""
    draw_imports.draw(tmp_path / "a.svg")
    assert shapes(tmp_path / "a.svg") == shapes(draw_imports.PICTURE)
    drawn = re.findall(r'id="(\S+) imports (\S+)"', draw_imports.PICTURE.read_text())
    graph = draw_imports.between_rooms()
    assert sorted(drawn) == sorted(graph) and len(graph) > 40
    at = draw_imports.places(graph)
    assert at.keys() == {room for floor in FLOORS for room in floor}
    assert all(at[here][1] > at[there][1] for here, there in drawn)
