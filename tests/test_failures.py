# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, stopped, broken or told to stop, anywhere in a step, in real runs.

tests/run_ranks.py starts the ranks and plants the faults. The short form makes a few of each kind,
the long form every place and rank, and what torchrun does on top.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import SCRIPT, Launcher, Result

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 30.0  # seconds, the promise
PATIENCE = {"silence": 4.0, "grace": 0.5, "unwind": 0.5}  # of the failure channel, shortened
STEPS = 8
MODEL = (
    "--mock-data --vocab-size 500 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --lr 1e-3 --log-interval 1 --sequence-parallel --num-workers 2 "
    f"--eval-interval 2 --eval-iters 2 --train-iters {STEPS} --save-interval 3"
).split()
TIMEOUT = 4.0  # seconds: of a collective, where a test waits for it
LATER = pytest.mark.prove
# the call of a point at which to strike: each is in step 2 or 3 of a run that saves after step 3
CALLS = {
    "connect": 1,
    "build": 1,
    "data": 3,
    "forward": 3,
    "receive": 6,
    "wait": 13,
    "send": 6,
    "layer": 9,
    "backward": 40,
    "gradient sums": 3,
    "update": 3,
    "evaluation": 2,
    "saving": 1,
    "committing": 1,
}


class Ranks:
    """Runs of a small model on several ranks."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def start(
        self,
        ranks: int,
        tp: int,
        fault: Any = None,
        folder: Path | None = None,
        pp: int = 1,
        flags: str = "",
        **job: Any,
    ) -> Path:
        """Start one, in the folder of an earlier one if that is named."""
        argv = [*MODEL, "--tensor-model-parallel-size", str(tp)]
        argv += ["--pipeline-model-parallel-size", str(pp)]
        argv += ["--global-batch-size", str(2 * ranks // tp), *flags.split()]
        argv += ["--save", "{dir}/saved", "--load", "{dir}/saved"]
        return self.launcher.start(ranks, argv, folder, fault=fault, **job)

    def run(self, *args: Any, **job: Any) -> Result:
        """Start one and wait for its end."""
        self.start(*args, **job)
        return self.launcher.wait()


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


def fault(point: str, rank: int, how: str) -> dict[str, Any]:
    """Describe a fault."""
    return {"point": point, "rank": rank, "call": CALLS[point], "how": how}


def check_blame(result: Result, victim: int, why: str) -> None:
    """Hold the survivors to the promise: they stop, soon, and all name the same first cause."""
    for rank, code in enumerate(result.codes):
        if rank != victim:
            assert code == 1, result.said(rank)
            assert result.ended[rank] - result.ended[victim] < LIMIT
            last = result.said(rank).splitlines()[-1]
            assert last.startswith(
                (f"[rank {rank}] stopping during ", f"[rank {rank}] stopping while")
            )
            assert f": rank {victim} failed first" in last and why in last, last


MESSAGES = ("receive", "wait", "send")  # points that only a pipeline passes
SERIAL = [point for point in CALLS if point not in MESSAGES]
KILLS = [
    (2, point, rank) for point in SERIAL for rank in (0, 1) if (point, rank) != ("committing", 1)
]
KILLS += [(4, point, rank) for point in SERIAL for rank in (0, 1, 3) if point != "committing"]
SAMPLE = [(2, "backward", 1), (2, "saving", 0), (4, "gradient sums", 3)]


@pytest.mark.parametrize(
    "world, point, rank",
    [pytest.param(*k, marks=[] if k in SAMPLE else pytest.mark.prove) for k in KILLS],
)
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
    result = ranks.run(2, 2, fault("backward", rank, "stop"), watch={"silence": 4.0})
    check_blame(result, rank, "no sign of life")


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.prove), 1])
def test_an_error_in_one_rank_is_what_all_report(ranks: Ranks, rank: int) -> None:
    result = ranks.run(2, 2, fault("update", rank, "raise"))
    why = "during the update of iteration 3: RuntimeError: broken on purpose"
    check_blame(result, rank, why)
    own = result.said(rank).splitlines()
    assert result.codes[rank] == 1 and own[0].startswith("Traceback")
    assert own[-1] == "RuntimeError: broken on purpose"


# A pipeline: (pp, tp, flags). Each stage waits for others only through messages.
PLAIN = (2, 1, "--num-layers 4")
CHUNKS = (2, 1, "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2")
V_SHAPE = (2, 2, "--num-layers 4 --pipeline-schedule zb-v")
LONG = (4, 1, "--num-layers 4 --pipeline-schedule zb-h1")
LOST = (*MESSAGES, "forward", "backward", "gradient sums", "update", "evaluation", "saving")
STAGES = [(PLAIN, point, rank) for point in LOST for rank in (0, 1)]
STAGES += [(LONG, point, rank) for point in LOST for rank in range(4)]
STAGES += [(V_SHAPE, point, rank) for point in LOST for rank in (0, 1, 3)]
SAMPLED = [(PLAIN, "wait", 0), (V_SHAPE, "send", 3)]


@pytest.mark.parametrize(
    "pipeline, point, rank",
    [pytest.param(*k, marks=[] if k in SAMPLED else pytest.mark.prove) for k in STAGES],
)
def test_a_killed_stage_is_named_by_all_others(
    ranks: Ranks, pipeline: tuple[int, int, str], point: str, rank: int
) -> None:
    pp, tp, flags = pipeline
    result = ranks.run(pp * tp, tp, fault(point, rank, "kill"), pp=pp, flags=flags)
    assert result.codes[rank] == -signal.SIGKILL
    check_blame(result, rank, "the process died (killed?)")
    if point == "wait" and pp == 2:  # the other one needs it for its next action
        doing = rf"while waiting for [FB] chunk \d micro-batch \d from stage \d \(rank {rank}\)"
        assert re.search(doing, result.said(1 - rank)), result.said(1 - rank)


@pytest.mark.prove
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("pipeline", [LONG, V_SHAPE])
@pytest.mark.parametrize("point", ["send", "gradient sums"])
def test_a_stopped_stage_is_named_by_all_others(
    ranks: Ranks, pipeline: tuple[int, int, str], point: str, rank: int
) -> None:
    pp, tp, flags = pipeline
    how = fault(point, rank, "stop")
    result = ranks.run(pp * tp, tp, how, pp=pp, flags=flags, watch=PATIENCE)
    check_blame(result, rank, "no sign of life")


@pytest.mark.parametrize("pipeline, rank", [(CHUNKS, 1), pytest.param(LONG, 2, marks=LATER)])
def test_an_error_in_one_stage_is_what_all_report(
    ranks: Ranks, pipeline: tuple[int, int, str], rank: int
) -> None:
    pp, tp, flags = pipeline
    result = ranks.run(pp * tp, tp, fault("send", rank, "raise"), pp=pp, flags=flags)
    assert result.said(rank).splitlines()[-1] == "RuntimeError: broken on purpose"
    why = "in stage [12] of iteration 1: RuntimeError: broken on purpose"
    assert re.search(why, result.said(0))
    check_blame(result, rank, "broken on purpose")


@pytest.mark.parametrize(
    "pipeline, point, call, victim, first, stuck",
    [
        (
            CHUNKS, "forward", 14, 1,
            "rank 0 failed first while waiting for F chunk 1 micro-batch 3 from stage 1 (rank 1) "
            "in stage 2 of iteration 2",
            "rank 1 was at: F chunk 0 micro-batch 3 in stage 1 of iteration 2",
        ),
        pytest.param(
            PLAIN, "evaluation", 2, 0,
            "rank 1 failed first while waiting for F chunk 0 micro-batch 0 from stage 0 (rank 0) "
            "in stage 1 of the evaluation after iteration 2",
            "rank 0 was at: waiting for its last messages to leave of the evaluation after ",
            marks=LATER,
        ),
        pytest.param(  # who times out first waits for one who waits, too
            LONG, "forward", 12, 2,
            "failed first while waiting for ",
            "rank 2 was at: F chunk 0 micro-batch 3 in stage 2 of iteration 2",
            marks=LATER,
        ),
        pytest.param(
            V_SHAPE, "forward", 6, 2,
            "failed first ",
            " at: F chunk ",
            marks=LATER,
        ),
        pytest.param(
            V_SHAPE, "update", 2, 3,
            "failed first during the ",
            "rank 3 was at: the update of iteration 2",
            marks=LATER,
        ),
    ],
)  # fmt: skip
def test_a_stage_that_stalls_ends_the_run_after_the_timeout(
    ranks: Ranks,
    pipeline: tuple[int, int, str],
    point: str,
    call: int,
    victim: int,
    first: str,
    stuck: str,
) -> None:
    """It is alive and beats; those who wait for it give up, and say for what, and where it is."""
    pp, tp, flags = pipeline
    how = {"point": point, "rank": victim, "call": call, "how": "stall"}
    began = time.monotonic()
    result = ranks.run(pp * tp, tp, how, pp=pp, flags=flags, timeout=TIMEOUT, watch=PATIENCE)
    assert result.codes == [1] * pp * tp and time.monotonic() - began < LIMIT
    told = [result.said(rank).splitlines()[-1] for rank in range(pp * tp)]
    for rank, last in enumerate(told):
        assert last.startswith(f"[rank {rank}] stopping"), last
        assert first in last and "Timed out waiting" in last and stuck in last, last
        assert last.partition(" failed first ")[2] == told[0].partition(" failed first ")[2]


@pytest.mark.parametrize(
    "more, says",
    [
        ({"1": ["--lr", "2e-3"]}, "--lr is 0.001 on rank 0 and 0.002 on rank 1: all ranks must"),
        ({"1": ["--lr", "-2"]}, "--lr -2: must be a number >= 0"),
        ({"0": ["--lr", "-2"]}, "--lr -2: must be a number >= 0"),
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


def test_what_only_rank_0_finds_is_told_to_all(ranks: Ranks) -> None:
    result = ranks.run(2, 2, more={str(r): ["--wandb-project", "x"] for r in range(2)})
    assert result.codes == [2, 1]
    assert "--wandb-project x: the package wandb is not installed" in result.said(0)
    check_blame(result, 0, "--wandb-project x: the package wandb is not installed")


@pytest.mark.parametrize("save", [1, pytest.param(3, marks=pytest.mark.prove)])
def test_a_save_that_fails_on_one_rank_ends_the_run_only_if_it_is_the_last(
    ranks: Ranks, save: int
) -> None:
    """Steps 3, 6 and 8 are saved."""
    result = ranks.run(2, 2, {"point": "saving", "rank": 1, "call": save, "how": "raise"})
    if save == 1:
        assert result.codes == [0, 0] and result.saved() == ["step_00000006", "step_00000008"]
        assert "rank 1: broken on purpose" in result.said(0, "out")
        assert "training goes on" in result.said(0, "out")
    else:
        assert result.codes == [1, 1] and result.saved() == ["step_00000003", "step_00000006"]
        for rank in range(2):
            (line,) = result.said(rank).splitlines()
            assert line.startswith("pretrain_llama.py: the checkpoint of step 8 was not saved")


def weights(result: Result) -> dict[str, str]:
    """Return the hash of every file of tensors, weights and optimizer, of the last checkpoint."""
    manifest = result.folder / "saved" / f"step_{STEPS:08d}" / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    found = {name: f["sha256"] for name, f in files.items() if name.endswith(".safetensors")}
    assert found
    return found


@pytest.mark.parametrize(
    "world, tp, how, rank",
    [
        (2, 2, "term", 1),
        pytest.param(2, 1, "int", -1, marks=pytest.mark.prove),
        pytest.param(2, 1, "term", 0, marks=pytest.mark.prove),
        pytest.param(4, 2, "term", 3, marks=pytest.mark.prove),
        pytest.param(1, 1, "int", 0, marks=pytest.mark.prove),
    ],
)
def test_a_signal_stops_all_ranks_after_the_same_step_and_the_run_goes_on_to_the_bit(
    ranks: Ranks, world: int, tp: int, how: str, rank: int
) -> None:
    whole = ranks.run(world, tp)
    assert whole.codes == [0] * world
    stopped = ranks.run(world, tp, fault("backward", rank, how))
    assert stopped.codes == [0] * world, stopped.said(0)
    (last,) = stopped.saved()[-1:]
    step = int(last.removeprefix("step_"))
    assert step < STEPS and f"stopped after iteration {step} of {STEPS}" in stopped.said(0, "out")
    if rank in (0, -1):
        assert "stopping after this step" in stopped.said(0)
    assert "Traceback" not in "".join(stopped.said(r) for r in range(world))
    resumed = ranks.run(world, tp, folder=stopped.folder)
    assert resumed.codes == [0] * world, resumed.said(0)
    assert weights(resumed) == weights(whole)
    assert set(whole.losses()) == set(resumed.losses())


def test_a_second_ctrl_c_ends_the_run_at_once(ranks: Ranks) -> None:
    result = ranks.run(2, 2, fault("backward", -1, "int twice"))
    assert result.codes == [130, 130]
    assert result.saved() == []
    assert "Traceback" not in result.said(0) + result.said(1)


@pytest.mark.parametrize("point", ["connect", "build"])
def test_ctrl_c_during_start_up_ends_it_without_a_trace(ranks: Ranks, point: str) -> None:
    result = ranks.run(2, 2, fault(point, -1, "int"))
    assert result.codes == [130, 130]
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


def test_ctrl_c_among_the_imports_leaves_no_trace() -> None:
    run = subprocess.Popen(
        [sys.executable, "pretrain_llama.py", *MODEL], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    maps, deadline = Path(f"/proc/{run.pid}/maps"), time.monotonic() + 60
    while "libtorch" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=60)[1] == ""
    assert run.returncode in (-signal.SIGINT, 130)


# What torchrun adds: it ends the survivors by SIGTERM as soon as one rank has ended.


class Torchrun:
    """The program under torchrun, in a session of its own."""

    def __init__(
        self, folder: Path, ranks: int, port: int, script: list[str], more: list[str] | None = None
    ) -> None:
        self.log, tp = folder / "log.jsonl", ["--tensor-model-parallel-size", "2"]
        argv = [*MODEL, *tp, "--save", f"{folder}/saved", "--log-json", str(self.log)]
        argv += ["--global-batch-size", str(ranks)]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--master-port", str(port), *script, *argv, *(more or [])]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def children(self) -> list[int]:
        """List the ranks' process ids."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def wait(self) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr; leave nothing running."""
        try:
            out, err = self.process.communicate(timeout=120)
        finally:
            if self.process.poll() is None:
                for pid in [*self.children(), self.process.pid]:
                    os.kill(pid, signal.SIGKILL)
        return self.process.returncode, out, err


@pytest.mark.parametrize(
    "world, point, rank, how",
    [
        (2, "build", 1, "kill"),
        pytest.param(4, "backward", 3, "kill", marks=pytest.mark.prove),
        pytest.param(4, "update", 0, "kill", marks=pytest.mark.prove),
        pytest.param(4, "connect", 0, "kill", marks=pytest.mark.prove),
        pytest.param(4, "forward", 1, "raise", marks=pytest.mark.prove),
    ],
)
def test_under_torchrun_the_cause_is_said_before_the_launcher_ends_the_others(
    tmp_path: Path,
    free_port: Callable[[], int],
    world: int,
    point: str,
    rank: int,
    how: str,
) -> None:
    script = [str(SCRIPT), json.dumps(fault(point, rank, how))]
    code, _, said = Torchrun(tmp_path, world, free_port(), script).wait()
    assert code != 0
    for other in set(range(world)) - {rank}:
        (line,) = [x for x in said.splitlines() if x.startswith(f"[rank {other}] stopping")]
        assert f": rank {rank} failed first" in line
    if how == "raise":
        assert "RuntimeError: broken on purpose" in said


@pytest.mark.prove
def test_under_torchrun_a_mistake_is_said_once_and_last(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    more = ["--lr-warmup-iters", "99"]
    code, _, said = Torchrun(tmp_path, 2, free_port(), ["pretrain_llama.py"], more).wait()
    says = "--lr-warmup-iters 99 must be less than the decay's length"
    assert code != 0
    lines = said.splitlines()
    assert sum(line.startswith(f"pretrain_llama.py: {says}") for line in lines) == 1
    assert says in lines[-2] and lines[-1].startswith("====")  # the end of torchrun's report
    assert "exitcode  : 2" in said and not (tmp_path / "saved").exists()


@pytest.mark.prove
@pytest.mark.parametrize("to", ["torchrun", "the terminal", "one rank"])
def test_under_torchrun_a_signal_saves_and_leaves_no_process(
    tmp_path: Path, free_port: Callable[[], int], to: str
) -> None:
    more = ["--train-iters", "1000000", "--eval-interval", "1000000", "--save-interval", "1000000"]
    run = Torchrun(tmp_path, 2, free_port(), ["pretrain_llama.py"], more)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (run.log.exists() and run.log.stat().st_size):
        time.sleep(0.05)
    pids = run.children()
    if to == "torchrun":
        run.process.send_signal(signal.SIGTERM)
    elif to == "the terminal":  # Ctrl-C: every process of the foreground group, torchrun again
        os.killpg(run.process.pid, signal.SIGINT)
    else:
        os.kill(pids[1], signal.SIGTERM)
    code, out, _ = run.wait()
    assert code == (0 if to == "one rank" else 1)  # torchrun's own, where the signal was for it
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "stopped after iteration" in out
    step = int(out.rsplit("stopped after iteration ", 1)[1].split()[0])
    assert (tmp_path / "saved" / f"step_{step:08d}" / "manifest.json").exists()


@pytest.mark.prove
@pytest.mark.parametrize("training", [True, False])
def test_no_rank_outlives_a_torchrun_that_was_killed(
    tmp_path: Path, free_port: Callable[[], int], training: bool
) -> None:
    """While training they save first; before, they may wait for ranks that will never come."""
    more = ["--train-iters", "1000000", "--eval-interval", "1000000", "--save-interval", "1000000"]
    run = Torchrun(tmp_path, 2, free_port(), ["pretrain_llama.py"], more)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (run.log.exists() and run.log.stat().st_size):
        if not training and len(run.children()) == 2:
            break
        time.sleep(0.05)
    pids = run.children()
    assert len(pids) == 2
    if not training:
        time.sleep(2.0)  # somewhere among the imports and the meeting
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + LIMIT
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert not training or list((tmp_path / "saved").glob("step_*/manifest.json"))


@pytest.mark.prove
def test_two_ranks_end_well_ten_times(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """No abort, no lost time, at an end that meets destructors and threads in any order."""
    for i in range(10):
        (tmp_path / str(i)).mkdir()
        folder, script = tmp_path / str(i), ["pretrain_llama.py"]
        code, _, said = Torchrun(folder, 2, free_port(), script).wait()
        assert code == 0 and "terminate called" not in said, said
