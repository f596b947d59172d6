# SPDX-License-Identifier: Apache-2.0
"""Mistakes put into a copy of the product are found by its rehearsal, by file and line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rehearsal_mutations
from tests.rehearsal_mutations import Site, mutated, near, sites_of

PROGRAM = Path(rehearsal_mutations.__file__)
TEXT = """
def forward(x, group):
    y = torch.empty(3, device=x.device, dtype=x.dtype)
    work.wait()
    return y
"""


def test_sites_are_waits_devices_dtypes_and_results():
    found = {(site.kind, site.line) for site, _ in sites_of("a.py", TEXT)}
    assert found == {("device", 3), ("dtype", 3), ("host read", 3), ("wait", 4)}
    removed = next(site for site, _ in sites_of("a.py", TEXT) if site.kind == "wait")
    assert mutated(TEXT, removed) == TEXT.replace("work.wait()", "pass")


def test_a_mutant_is_found_at_its_line_on_the_way_to_it_or_elsewhere():
    site = Site("wait", "a.py", 10, 0, 0, "pass")
    one = {"place": "b.py:10", "also": "", "through": []}
    assert near([], site) == "" and near([one], site) == "elsewhere"
    assert near([{**one, "also": "a.py:15"}], site) == "place"
    assert near([{**one, "also": "a.py:16"}], site) == "elsewhere"
    assert near([{**one, "through": ["a.py:9"]}], site) == "way"


def run(count, seed):
    words = [sys.executable, PROGRAM, "--seed", str(seed), "--count", str(count)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return lines, [line for line in lines if re.match("(place|way|elsewhere|NOT FOUND) ", line)]


MOST_SURVIVORS = 5  # of 100, as measured at seed 2026


@pytest.mark.prove
def test_most_of_a_hundred_mutants_are_found_and_nothing_in_the_product():
    lines, tried = run(100, 2026)
    clean = [line for line in lines if line.startswith("layout ")]
    layouts = len(rehearsal_mutations.LAYOUTS)
    assert len(clean) == layouts and all(line.endswith("findings: []") for line in clean)
    survivors = [line for line in tried if line.startswith("NOT FOUND")]
    assert len(tried) == 100 and len(survivors) <= MOST_SURVIVORS, survivors
