# SPDX-License-Identifier: Apache-2.0
"""Each planted fault fits the product as it is, and names of what it shows are there."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests import rehearsal_faults
from tests.rehearsal_faults import FOUND, ROOT, faults, functions, how_found

MOST_KINDS, FAULTS, LEAST_FOUND = 41, 136, 126
SAMPLE = (1, 16)  # a sum over tp left out, and a gradient that is overwritten


def planted(tmp_path, *words):
    """Plant faults; return how each was found, by its number."""
    file = tmp_path / "found.json"
    program = [sys.executable, rehearsal_faults.__file__, *words, "--json", str(file)]
    subprocess.run(program, capture_output=True, text=True, check=True)
    return json.loads(file.read_text())


@pytest.mark.prove
def test_two_planted_faults_are_found(tmp_path):
    found = planted(tmp_path, "--number", *map(str, SAMPLE))
    assert len(found) == len(SAMPLE) and set(found.values()) <= {*FOUND}, found


@pytest.mark.prove
def test_planted_faults_are_found_as_often_as_the_page_says(tmp_path):
    found = planted(tmp_path)
    assert sum(how in FOUND for how in found.values()) >= LEAST_FOUND, found


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
    fault = next(each for each in faults() if "mpu/comm/mappings.py::_Pair.backward" in each.shows)
    at = fault.lines().start
    one = {"place": f"{fault.file}:{at}", "also": "", "through": []}
    assert how_found(fault, [one]) == "place"
    assert (
        how_found(fault, [{**one, "place": "a.py:1", "through": [f"{fault.file}:{at}"]}]) == "way"
    )
    backward = dict(functions((ROOT / fault.file).read_text()))["_Pair.backward"]
    assert how_found(fault, [{**one, "place": f"{fault.file}:{backward.start + 1}"}]) == "effect"
    assert how_found(fault, [{**one, "place": "a.py:1"}]) == "elsewhere"
    assert how_found(fault, []) == how_found(fault, "it did not end") == ""
