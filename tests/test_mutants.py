# SPDX-License-Identifier: Apache-2.0
"""tests/mutants.py: what it changes, what it leaves alone, and that a marked file does the same."""

import sys
from types import ModuleType

from tests import mutants

TEXT = '''"""A module: 3 + 4."""
import math


def f(x: int = 1, *, axis: str = "tp") -> float:
    if math.isnan(x) or not x > 2:
        raise ValueError(f"{x + 1} is not 2")
    found = [x, 3]
    found.append(x - 1)
    found.sort()
    return max(found[0], x) * 0.5
'''


def changed(site: mutants.Site) -> str:
    edit = (site.start, site.end, site.new.encode())
    return mutants.edited(TEXT.encode(), [edit]).decode()


def test_what_is_changed():
    sites = mutants.Finder("mpu/x.py", TEXT).found
    lines = TEXT.splitlines()
    seen = set()
    for site in sites:
        compile(changed(site), site.file, "exec")
        assert changed(site) != TEXT and site.old in TEXT
        others = [
            n
            for n, (a, b) in enumerate(zip(lines, changed(site).splitlines(), strict=True))
            if a != b
        ]
        assert others and {0, 6}.isdisjoint(others), "text and messages stay"
        seen.add((site.kind, site.old, site.new))
    for one in [
        ("operator", "x > 2", "(x >= 2)"),
        ("operator", "math.isnan(x) or not x > 2", "(math.isnan(x) and (not x > 2))"),
        ("operator", "not x > 2", "(x > 2)"),
        ("operator", "x - 1", "(x + 1)"),
        ("constant", "0.5", "1.0"),
        ("constant", "3", "4"),
        ("axis", '"tp"', "'cp'"),
        ("order", "max(found[0], x)", "max(x, found[0])"),
        ("order", "x - 1", "(1 - x)"),
        ("call", "found.sort()", "pass"),
    ]:
        assert one in seen, one
    assert {kind for kind, _, _ in seen} == set(mutants.KINDS)
    assert len({site.key for site in sites}) == len(sites)


def test_a_marked_file_does_the_same_and_notes_what_ran(monkeypatch):
    hits = []
    touch = ModuleType("weft_touch")
    touch.hit = hits.append
    monkeypatch.setitem(sys.modules, "weft_touch", touch)
    sites = list(enumerate(mutants.Finder("mpu/x.py", TEXT).found))
    for number, site in sites:
        marked = mutants.marked(TEXT.encode(), [(number, site)]).decode()
        assert len(marked.splitlines()) == len(TEXT.splitlines())
        plain, noted = {}, {}
        exec(TEXT, plain)
        exec(marked, noted)
        hits.clear()
        assert noted["f"](5) == plain["f"](5) == 2.5
        assert hits == [number] * (site.mark != "") or site.line == 5  # a default runs once
