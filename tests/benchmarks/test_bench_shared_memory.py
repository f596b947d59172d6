# SPDX-License-Identifier: Apache-2.0
"""The shared-memory benchmark times three ways to one result, and its ratios are right."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bench_shared_memory import SIDES, VERBS, calls, measure, table

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_shared_memory.py"


def results(comm) -> None:
    axis = comm.grid(tp=comm.size, memory=True).tp
    for verb in VERBS:
        before = axis.transport.workspace.epoch
        sides = calls(verb, axis, 4, torch.float32)
        assert tuple(sides) == SIDES
        [gloo, ordered, memory] = [sides[side]().clone() for side in SIDES]
        if verb == "all_reduce":  # in place: the ranks then add the same again
            gloo, ordered = 4 * gloo, 2 * ordered
        assert torch.equal(ordered, memory) and memory.any(), verb
        torch.testing.assert_close(gloo, memory)
        assert axis.transport.workspace.epoch == before + 1, "one side of three goes through memory"
        found = measure(axis, sides, 5)
        assert all(len(found[side]) == 5 and min(found[side]) > 0 for side in SIDES)


@pytest.mark.prove
def test_the_sides_agree(world):
    world(2).run(results)


def test_table():
    found = {f"{verb} {dtype} 2048 gloo": [0.008] for verb in VERBS for dtype in ("fp32", "bf16")}
    found |= {key.replace("gloo", "ordered"): [0.001, 0.004, 0.009] for key in found}
    found |= {key.replace("gloo", "memory"): [0.002] for key in found if key.endswith("gloo")}
    lines = table(found, [2048])
    assert len(lines) == 2 + 8
    assert (
        lines[2] == "| all_gather in place, fp32 | 2 MiB | 8.000 | 4.000 | 2.000 | **4.0** | 2.0 |"
    )


@pytest.mark.prove
def test_in_full():
    words = [sys.executable, str(SCRIPT), "--sizes", "64", "--launches", "1", "--calls", "3"]
    done = subprocess.run([*words, "--barrier-ranks", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| 64 KiB |") == 8 and "barrier of 3 ranks, memory: " in done.stdout
