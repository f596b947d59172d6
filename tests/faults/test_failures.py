# SPDX-License-Identifier: Apache-2.0
"""Errors, mistakes and Ctrl-C in real runs.

tests/run_ranks.py starts the ranks and injects the faults. tests/chaos plays ranks that are killed,
stopped or told to stop, test_kills.py kills them at every place, test_pipeline_failures.py in the
stages of a pipeline, and test_torchrun.py tests what a launcher adds.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.small_run import MODEL, Ranks, check_blame, fault
from tests.launcher import Launcher

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.prove), 1])
def test_an_error_in_one_rank_is_what_all_report(ranks: Ranks, rank: int) -> None:
    result = ranks.run(2, 2, fault("update", rank, "raise"))
    why = "during the update of iteration 3: RuntimeError: broken on purpose"
    check_blame(result, rank, why)
    own = result.said(rank).splitlines()
    assert result.codes[rank] == 1 and own[0].startswith("Traceback")
    assert own[-1] == "RuntimeError: broken on purpose"


@pytest.mark.parametrize(
    "more, says",
    [
        ({"1": ["--lr", "2e-3"]}, "--lr is 0.001 on rank 0 and 0.002 on rank 1: all ranks need"),
        ({"1": ["--lr", "-2"]}, "--lr -2: must be a number >= 0"),
        ({"0": ["--lr", "-2"], "1": ["--lr", "-2"]}, "--lr -2: must be a number >= 0"),
        ({"1": ["--num-layers", "3"]}, "--num-layers is 2 on rank 0 and 3 on rank 1"),
    ],
)
def test_a_mistake_of_one_rank_is_told_to_all(ranks: Ranks, more: Any, says: str) -> None:
    result = ranks.run(2, 2, more=more)
    assert result.codes == [2, 2] and max(result.ended) < 10
    for rank in range(2):
        (line,) = result.said(rank).splitlines()
        assert line.startswith("pretrain_llama.py: ") and says in line
    assert not (result.folder / "saved").exists()


@pytest.mark.prove
def test_time_is_up_for_all_when_it_is_for_one(ranks: Ranks) -> None:
    """Clocks differ; a rank that saves while another one trains would wait for it for ever."""
    result = ranks.run(2, 1, late=1)
    assert result.codes == [0, 0]
    assert result.saved() == ["step_00000002"] and "stopped after iteration 2" in result.said(
        0, "out"
    )


@pytest.mark.prove
def test_a_second_ctrl_c_ends_the_run_at_once(ranks: Ranks) -> None:
    result = ranks.run(2, 2, fault("backward", -1, "int twice"))
    assert result.codes == [130, 130]
    assert result.saved() == []
    assert "Traceback" not in result.said(0) + result.said(1)


@pytest.mark.prove
@pytest.mark.parametrize("point", ["build", "connect"])
def test_ctrl_c_during_start_up_ends_it_without_a_trace(ranks: Ranks, point: str) -> None:
    result = ranks.run(2, 2, fault(point, -1, "int"))
    assert result.codes == [130, 130]
    assert "SIGINT: stopped at once\n" in result.said(0)
    assert "SIGINT: stopped" not in result.said(1)  # one rank speaks
    assert "Traceback" not in result.said(0) + result.said(1)
    assert not (result.folder / "saved").exists()


def test_ctrl_c_ends_a_rank_that_waits_for_others(ranks: Ranks) -> None:
    """Rank 0 of 2 waits, inside of C++, for a rank 1 that nobody starts."""
    folder = ranks.start(1, 2, world=2)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", ranks.launcher.port), timeout=1).close()
            break  # the store is up
        except OSError:
            time.sleep(0.05)
    os.kill(int((folder / "pid.0").read_text()), signal.SIGINT)
    result = ranks.launcher.wait()
    assert result.codes == [130] and "Traceback" not in result.said(0)


def test_ctrl_c_among_the_imports_prints_one_line() -> None:
    run = subprocess.Popen(
        [sys.executable, "pretrain_llama.py", *MODEL], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    maps, deadline = Path(f"/proc/{run.pid}/maps"), time.monotonic() + 60
    while "libtorch" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=60)[1].splitlines()
    slow = [line for line in said if line.startswith("importing torch")]  # after 5 s
    assert said == [*slow, "pretrain_llama.py: stopped by Ctrl-C"]
    assert run.returncode in (-signal.SIGINT, 130)
