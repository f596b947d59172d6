# SPDX-License-Identifier: Apache-2.0
"""A save that dies in the middle, by exception or by kill -9, leaves the last whole checkpoint."""

import os
from pathlib import Path
from typing import Any

import pytest

PHASES = ("start", "piece", "shards", "manifest", "aside", "renamed")


class Killed(BaseException):
    """Stands for a process that ends right here: nothing may clean up after it."""


@pytest.mark.parametrize(
    ("phase", "again"),
    [(p, a) for p in PHASES for a in (False, True) if a or p != "aside"],  # aside: replacing only
)
def test_a_save_that_ends_in_the_middle(
    tmp_path: Path, phase: str, again: bool, write: Any, newest: Any
) -> None:
    """`again`: the step that is being saved exists already, from an earlier run."""
    write(tmp_path, 1)
    if again:
        write(tmp_path, 2)

    def hook(at: str) -> None:
        if at == phase:
            raise Killed

    with pytest.raises(Killed):
        write(tmp_path, 2, hook=hook)
    step, notes = newest(tmp_path)
    assert step == (2 if again or phase == "renamed" else 1)
    unfinished = phase not in ("start", "renamed")
    assert any(".tmp-" in n and "did not finish" in n for n in notes) == unfinished
    write(tmp_path, 3)
    assert newest(tmp_path) == (3, [])
    left = [n for n in os.listdir(tmp_path) if ".tmp-" in n]
    assert not left, "the next save clears what a killed one left"


KILL = """
import os, signal, sys
from pathlib import Path
import torch
from mpu.grid import Grid
from training.checkpoint import save
from training.checkpoint.pieces import whole

root, phases = Path(sys.argv[1]), sys.argv[2:]
torch.set_num_threads(1)

def write(at, step, phase=""):
    def hook(now):
        if now == phase:
            os.kill(os.getpid(), signal.SIGKILL)
    pieces = [whole(n, torch.full((5, 3), float(step))) for n in ("a", "b")]
    save(at, step=step, pieces=pieces, state={"step": step}, grid=Grid(), hook=hook)

for phase in phases:
    write(root / phase, 1)
    child = os.fork()
    if child == 0:
        write(root / phase, 2, phase)
        os._exit(0)
    print(phase, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_kill_9_in_each_phase(tmp_path: Path, newest: Any, python: Any) -> None:
    phases = [p for p in PHASES if p != "aside"]
    done = python(KILL, str(tmp_path), *phases)
    assert done.stdout.splitlines() == [f"{p} -9" for p in phases], done.stderr
    for phase in phases:
        assert newest(tmp_path / phase)[0] == (2 if phase == "renamed" else 1)
