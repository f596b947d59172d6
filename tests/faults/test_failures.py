# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, stopped, broken or told to stop, anywhere in a step, in real runs.

tests/run_ranks.py starts the ranks and injects the faults. The short form tests a few of each kind,
the long form every place and rank. test_pipeline_failures.py tests the stages of a pipeline,
test_torchrun.py what a launcher adds.
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

from tests.faults.small_run import MODEL, STEPS, Ranks, check_blame, fault, weights
from tests.launcher import Launcher
from tests.sampling import sampled

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


# in a step and while saving: tests/faults/test_kills.py
KILLS = [(2, "gradient sums", 1), (2, "connect", 1), (2, "build", 1), (4, "evaluation", 3),
         (4, "layer", 0)]  # fmt: skip


@pytest.mark.parametrize("world, point, rank", sampled(KILLS, len(KILLS)))
def test_a_killed_rank_is_named_by_all_others(
    ranks: Ranks, world: int, point: str, rank: int
) -> None:
    result = ranks.run(world, 2, fault(point, rank, "kill"))
    assert result.codes[rank] == -signal.SIGKILL
    check_blame(result, rank, "the process died (killed?)")


@pytest.mark.prove
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_by_all_others(ranks: Ranks, rank: int) -> None:
    """Nothing breaks, nothing moves: only the missing beats tell."""
    result = ranks.run(2, 2, fault("backward", rank, "stop"), monitor={"silence": 4.0})
    check_blame(result, rank, "no heartbeat")


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.prove), 1])
def test_an_error_in_one_rank_is_what_all_report(ranks: Ranks, rank: int) -> None:
    result = ranks.run(2, 2, fault("update", rank, "raise"))
    why = "during the update of iteration 3: RuntimeError: broken on purpose"
    check_blame(result, rank, why)
    own = result.said(rank).splitlines()
    assert result.codes[rank] == 1 and own[0].startswith("Traceback")
    assert own[-1] == "RuntimeError: broken on purpose"


@pytest.mark.prove
def test_an_exit_before_the_run_is_done_is_a_failure(ranks: Ranks) -> None:
    """A loader that calls sys.exit(0) says no goodbye, and its rank does not end well."""
    result = ranks.run(2, 2, fault("data", 1, "exit"))
    assert result.codes[1] == 1
    check_blame(result, 1, "before the run was done")


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


@pytest.mark.prove  # in short in tests/training/checkpoint/test_damage.py
@pytest.mark.parametrize("save", [1, 3])
def test_a_save_that_fails_on_one_rank_ends_the_run_only_if_it_is_the_last(
    ranks: Ranks, save: int
) -> None:
    """Steps 3, 6 and 8 are saved."""
    result = ranks.run(2, 2, {"point": "saving", "rank": 1, "call": save, "how": "raise"})
    if save == 1:
        assert result.codes == [0, 0] and result.saved() == ["step_00000006", "step_00000008"]
        assert "rank 1: broken on purpose" in result.said(0, "out")
        assert "training continues" in result.said(0, "out")
    else:
        assert result.codes == [1, 1] and result.saved() == ["step_00000003", "step_00000006"]
        for rank in range(2):
            (line,) = result.said(rank).splitlines()
            assert line.startswith("pretrain_llama.py: the checkpoint of step 8 was not saved")


@pytest.mark.prove
@pytest.mark.parametrize(
    "world, tp, how, rank",
    [
        (2, 2, "term", 1),
        (2, 1, "int", -1),
        (4, 2, "term", 3),
    ],
)
def test_a_signal_stops_all_ranks_after_the_same_step_and_the_run_goes_on_to_the_bit(
    ranks: Ranks, world: int, tp: int, how: str, rank: int
) -> None:
    undisturbed = ranks.run(world, tp)
    assert undisturbed.codes == [0] * world
    stopped = ranks.run(world, tp, fault("backward", rank, how))
    assert stopped.codes == [os.EX_TEMPFAIL] * world, stopped.said(0)
    (last,) = stopped.saved()[-1:]
    step = int(last.removeprefix("step_"))
    name = {"term": "SIGTERM", "int": "SIGINT"}[how]
    by = name if rank in (0, -1) else "a signal to another rank"
    note = f"stopped by {by} after iteration {step} of {STEPS}; saved: the same command resumes"
    assert step < STEPS and note in stopped.said(0, "out")
    if rank in (0, -1):
        assert "stopping after this step" in stopped.said(0)
    assert "Traceback" not in "".join(stopped.said(r) for r in range(world))
    resumed = ranks.run(world, tp, folder=stopped.folder)
    assert resumed.codes == [0] * world, resumed.said(0)
    assert weights(resumed) == weights(undisturbed)
    assert set(undisturbed.losses()) == set(resumed.losses())


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
