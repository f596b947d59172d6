# SPDX-License-Identifier: Apache-2.0
"""Failures and signals under torchrun, which ends the survivors by SIGTERM when one rank ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.faults.small_run import LIMIT, MESSAGES, MODEL, fault
from tests.launcher import SCRIPT

ROOT = Path(__file__).resolve().parents[2]


class Torchrun:
    """The program under torchrun, in a session of its own."""

    def __init__(
        self, folder: Path, ranks: int, port: int, script: list[str],
        more: list[str] | None = None, launcher: Sequence[str] = ("-m", "torch.distributed.run"),
    ) -> None:  # fmt: skip
        self.log, tp = folder / "log.jsonl", ["--tensor-model-parallel-size", "2"]
        argv = [*MODEL, *tp, "--save", f"{folder}/saved", "--log-json", str(self.log)]
        argv += ["--global-batch-size", str(ranks)]
        command = [sys.executable, *launcher, "--nproc-per-node", str(ranks)]
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


@pytest.mark.prove
@pytest.mark.parametrize(
    "world, point, rank, how",
    [
        (2, "build", 1, "kill"),
        (4, "backward", 3, "kill"),
        (4, "update", 0, "kill"),
        (4, "connect", 0, "kill"),
        (4, "forward", 1, "raise"),
        (4, "send", 2, "kill"),
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
    # at once, rank 0 would die before the others have joined the failure channel that it keeps
    later = {"during": "connecting the process groups"} if point == "connect" else {}
    script = [str(SCRIPT), json.dumps(fault(point, rank, how) | later)]
    more = ["--pipeline-model-parallel-size", "2"] if point in MESSAGES else []
    code, _, said = Torchrun(tmp_path, world, free_port(), script, more).wait()
    assert code != 0
    for other in set(range(world)) - {rank}:
        (line,) = [x for x in said.splitlines() if x.startswith(f"[rank {other}] stopping")]
        assert f": rank {rank} failed first" in line
    if how == "raise":
        assert "RuntimeError: broken on purpose" in said
    cause = said[said.index("Root Cause") :]  # torchrun's report ends with it
    names = "broken on purpose" if how == "raise" else f"rank {rank} "
    assert names in cause or f"rank      : {rank} " in cause


@pytest.mark.prove
def test_under_torchrun_a_mistake_is_printed_once_and_ends_the_report(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    more = ["--lr-warmup-iters", "99"]
    code, _, said = Torchrun(tmp_path, 2, free_port(), ["pretrain_llama.py"], more).wait()
    says = "--lr-warmup-iters 99 must be less than the decay's length"
    assert code != 0
    lines = said.splitlines()
    assert sum(line.startswith(f"pretrain_llama.py: {says}") for line in lines) == 1
    assert lines[-1].startswith("====") and says in lines[-2]  # the end of torchrun's report
    assert "exitcode  : 2" in said and not (tmp_path / "saved").exists()


def trained(
    folder: Path, port: int, launcher: Sequence[str] = ("-m", "torch.distributed.run")
) -> Torchrun:
    """Return a run without an end that has made a step."""
    more = ["--train-iters", "1000000", "--eval-interval", "1000000", "--save-interval", "1000000"]
    run = Torchrun(folder, 2, port, ["pretrain_llama.py"], more, launcher)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (run.log.exists() and run.log.stat().st_size):
        time.sleep(0.05)
    return run


def check_saved(folder: Path, out: str) -> None:
    """The run said that it saved its last step, and it did."""
    assert "stopped by " in out and f"saved: with --load {folder}/saved the same" in out
    step = int(out.rsplit(" after iteration ", 1)[1].split()[0])
    assert (folder / "saved" / f"step_{step:08d}" / "manifest.json").exists()


@pytest.mark.prove
@pytest.mark.parametrize("to", ["torchrun", "the terminal", "one rank"])
def test_under_torchrun_a_signal_saves_and_leaves_no_process(
    tmp_path: Path, free_port: Callable[[], int], to: str
) -> None:
    run = trained(tmp_path, free_port())
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
    check_saved(tmp_path, out)


@pytest.mark.prove
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_our_torchrun_passes_a_signal_on_and_says_it_last(
    tmp_path: Path, free_port: Callable[[], int], number: signal.Signals
) -> None:
    """And starts nothing again."""
    run = trained(tmp_path, free_port(), ["tools/torchrun.py", "--max-restarts", "3"])
    run.process.send_signal(number)
    code, out, said = run.wait()
    assert code == 128 + number and said.endswith(f"torchrun: ended by {number.name}\n")
    assert f"{number.name}: stopping after this step" in said
    check_saved(tmp_path, out)


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
