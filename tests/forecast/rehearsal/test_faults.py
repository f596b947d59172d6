# SPDX-License-Identifier: Apache-2.0
"""Each planted fault fits the product as it is, and names of what it shows are there."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests import rehearsal_faults
from tests.rehearsal_faults import FOUND, ROOT, faults, functions, how_found

KINDS, FAULTS = 40, 130
SAMPLE = (1, 42)  # a sum over tp left out, by a test of numbers; a blocking copy, by a rule


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
def test_every_planted_fault_is_found_that_is_not_known_to_be_missed(tmp_path):
    found = planted(tmp_path)
    assert len(found) == sum(not fault.missed for fault in faults())
    assert set(found.values()) <= {*FOUND}, found


def test_every_planted_fault_is_one_edit_that_python_can_read():
    every = faults()
    assert (len(every), len(Counter(fault.kind for fault in every))) == (FAULTS, KINDS)
    for fault in every:
        assert sum(map(bool, (fault.rule, fault.test, fault.missed))) == 1, fault.number
        if fault.test:
            file, _, name = fault.test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), fault.test
        names = dict(functions(fault.text()))
        assert names and fault.old != fault.new
        for shown in fault.shows:
            file, _, name = shown.partition("::")
            there = fault.text() if file == fault.file else (ROOT / file).read_text()
            assert not name or name in dict(functions(there)), (fault.number, shown)


def test_a_fault_is_found_at_its_line_on_the_way_or_where_its_effect_shows():
    fault = next(each for each in faults() if each.file == "mpu/comm/mappings.py")
    fault = fault._replace(shows=("mpu/comm/mappings.py::_Pair.backward",))
    at = fault.lines().start
    fault = fault._replace(rule="traffic")
    one = {"kind": "traffic", "place": f"{fault.file}:{at}", "also": "", "through": []}
    assert how_found(fault, [one]) == "place"
    assert (
        how_found(fault, [{**one, "place": "a.py:1", "through": [f"{fault.file}:{at}"]}]) == "way"
    )
    backward = dict(functions((ROOT / fault.file).read_text()))["_Pair.backward"]
    assert how_found(fault, [{**one, "place": f"{fault.file}:{backward.start + 1}"}]) == "effect"
    assert how_found(fault, [{**one, "place": "a.py:1"}]) == "elsewhere"
    assert how_found(fault, [{**one, "kind": "work"}]) == ""
    assert how_found(fault, []) == how_found(fault, "it did not end") == ""
