# SPDX-License-Identifier: Apache-2.0
"""Freed blocks stay with the process: touching as much memory again faults in no new pages."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import resource, sys, torch
from training.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    held = [torch.ones(n << 18) for n in range(1, 17)]  # 136 MB in blocks of 1 to 16 MB
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    return int(subprocess.check_output([sys.executable, "-c", PROGRAM, how], text=True, cwd=ROOT))


def test_freed_memory_is_kept():

    assert faults("keep") < 100
    assert faults("give back") > 1000, "the C library keeps it by itself: drop training/memory.py"
