# SPDX-License-Identifier: Apache-2.0
"""Freed blocks stay with the process: touching as much memory again faults in no new pages."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import resource, sys, torch
from training.run.device import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    held = [torch.ones(n << 18) for n in range(1, 17)]  # 136 MB in blocks of 1 to 16 MB
for _ in range(int(sys.argv[2])):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, warm: int) -> int:
    """Return the page faults of five steps after `warm` others."""
    words = [sys.executable, "-c", PROGRAM, how, str(warm)]
    return int(subprocess.check_output(words, text=True, cwd=ROOT))


@pytest.mark.prove
def test_freed_memory_is_kept():
    # Until every block has found its place, a dozen steps at most, the heap may still grow; the C
    # library by itself gives back for a while, too, until it has learned how large blocks are.
    assert faults("keep", 40) < 100
    assert faults("give back", 1) > 1000, "the C library keeps it: drop keep_freed_memory"
