# SPDX-License-Identifier: Apache-2.0
"""Each planted fault fits the product as it is, and names of what it shows are there."""

from collections import Counter

from tests.rehearsal_faults import ROOT, faults, functions, how_found

MOST_KINDS, FAULTS = 38, 136


def test_every_planted_fault_is_one_edit_that_python_can_read():
    every = faults()
    assert (len(every), len(Counter(fault.kind for fault in every))) == (FAULTS, MOST_KINDS)
    for fault in every:
        names = dict(functions(fault.text()))
        assert names and fault.old != fault.new
        for shown in fault.shows:
            file, _, name = shown.partition("::")
            there = fault.text() if file == fault.file else (ROOT / file).read_text()
            assert not name or name in dict(functions(there)), (fault.number, shown)


def test_a_fault_is_found_at_its_line_on_the_way_or_where_its_effect_shows():
    fault = next(each for each in faults() if "mpu/grid.py::Grid.data" in each.shows)
    at = fault.lines().start
    one = {"place": f"{fault.file}:{at}", "also": "", "through": []}
    assert how_found(fault, [one]) == "place"
    assert (
        how_found(fault, [{**one, "place": "a.py:1", "through": [f"{fault.file}:{at}"]}]) == "way"
    )
    data = dict(functions((ROOT / fault.file).read_text()))["Grid.data"]
    assert how_found(fault, [{**one, "place": f"{fault.file}:{data.start + 1}"}]) == "effect"
    assert how_found(fault, [{**one, "place": "a.py:1"}]) == "elsewhere"
    assert how_found(fault, []) == how_found(fault, "it did not end") == ""
