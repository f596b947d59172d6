# SPDX-License-Identifier: Apache-2.0
"""docs/imports.svg is the graph of imports, and each of its arrows points down."""

import re
from collections import Counter

from tests import draw_imports
from tests.test_layering import FLOORS, ROOT
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


def test_an_arrow_that_follows_from_others_is_known():
    graph = Counter([("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")])
    assert [arrow for arrow in graph if draw_imports.follows(arrow, graph)] == [("a", "c")]


def test_small_modules_with_one_importer_are_printed(capsys):
    assert draw_imports.main(["--small", "60"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert last == f"{len(rows)} modules of fewer than 60 lines have exactly one importer"
    for row in rows:
        lines, name, user = row.split()
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert int(lines) == len((ROOT / name).read_text().splitlines()) < 60
        assert module.rpartition(".")[2] in (ROOT / user).read_text()
    assert [row.split()[1] for row in rows] == sorted(row.split()[1] for row in rows)


def test_the_files_of_a_room_are_printed(capsys):
    assert draw_imports.main(["--files", "mpu/comm"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    files = (ROOT / "mpu/comm").rglob("*.py")
    assert rows.keys() == {path.relative_to(ROOT).as_posix() for path in files}
    assert rows["mpu/comm/transport.py"] in (ROOT / "mpu/comm/transport.py").read_text()
