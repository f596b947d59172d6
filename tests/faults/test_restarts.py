# SPDX-License-Identifier: Apache-2.0
"""torchrun --max-restarts heals a run, and starts none again that cannot go on.

A rank is killed at nine places of a step and of a save: the run that torchrun starts again ends
with the losses, weights and optimizer state of an undisturbed one, bit for bit.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.small_run import MODEL, STEPS, Ranks, fault, weights
from tests.launcher import Launcher, Result
from training.checkpoint.manifest import step_name

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/faults/restarted_rank.py"
PLAIN, OURS = ["-m", "torch.distributed.run"], ["tools/torchrun.py"]
IN_STEP, IN_SAVE = {"from": 5}, {"save": 2}  # steps 3, 6 and 8 are saved
# name: (the point, its call, when, the rank that is killed, which step is loaded)
PLACES: dict[str, tuple[str, int, dict[str, int], int, int]] = {
    "data": ("data", 1, IN_STEP, 1, 3),
    "forward": ("layer", 3, IN_STEP, 1, 3),
    "backward": ("backward", 4, IN_STEP, 0, 3),
    "reduction": ("gradient sums", 1, IN_STEP, 1, 3),
    "update": ("update", 1, IN_STEP, 1, 3),
    "a shard is begun": ("save: piece", 1, IN_SAVE, 1, 3),
    "all shards are written": ("save: shards", 1, IN_SAVE, 0, 3),
    "the manifest is written aside": ("save: manifest", 1, IN_SAVE, 0, 3),
    "renamed": ("save: renamed", 1, IN_SAVE, 0, 6),
}


class Torchrun:
    """Runs under torchrun that save in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self, attempts: dict[str, Any], *options: str, launcher: list[str] = PLAIN,
        flags: str = "", ranks: int = 2,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run to the end, disturbed as restarted_rank.py says."""
        argv = [*MODEL, "--tensor-model-parallel-size", "2", "--global-batch-size", "2"]
        argv += ["--save", f"{self.folder}/saved", "--load", f"{self.folder}/saved"]
        argv += ["--log-json", f"{self.folder}/log.jsonl", *flags.split()]
        command = [sys.executable, *launcher, "--nproc-per-node", str(ranks)]
        command += [*options, SCRIPT, json.dumps(attempts), *argv]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def result(self) -> Result:
        """Return what the run left."""
        return Result([0, 0], [0.0, 0.0], False, self.folder, 0.0)


@pytest.fixture
def torchrun(tmp_path: Path) -> Torchrun:
    return Torchrun(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher) -> Result:
    """The run that nobody disturbs, whose ranks nothing starts again."""
    found = Ranks(launcher).run(2, 2, flags="--log-json {dir}/log.jsonl")
    assert found.codes == [0, 0], found.said(0)
    return found


@pytest.mark.prove
@pytest.mark.parametrize("place", PLACES)
def test_a_run_whose_rank_is_killed_ends_with_the_bits_of_an_undisturbed_one(
    torchrun: Torchrun, undisturbed: Result, place: str
) -> None:
    point, call, when, victim, step = PLACES[place]
    kill = {"point": point, "call": call, "rank": victim, "how": "kill", **when}
    healed = torchrun.run({"0": {"fault": kill}}, "--standalone", "--max-restarts", "1")
    assert healed.returncode == 0, healed.stderr
    assert f": rank {victim} failed first" in healed.stderr
    loaded = re.findall(r"^loaded \S+/(\S+): at iteration", healed.stdout, re.M)
    assert loaded == [step_name(step)]
    assert weights(torchrun.result()) == weights(undisturbed)
    assert set(torchrun.result().losses()) == set(undisturbed.losses())


@pytest.mark.prove
@pytest.mark.parametrize("options", [["--standalone"], ["--master-port", "PORT"]])
def test_a_run_whose_ranks_die_twice_is_healed_twice(
    torchrun: Torchrun, undisturbed: Result, free_port: Callable[[], int], options: list[str]
) -> None:
    options = [str(free_port()) if word == "PORT" else word for word in options]
    attempts = {
        "0": {"fault": fault("update", 1, "kill") | {"from": 5, "call": 1}},
        "1": {"fault": fault("backward", 0, "kill") | {"from": 7, "call": 1}},
    }
    healed = torchrun.run(attempts, *options, "--max-restarts", "2")
    assert healed.returncode == 0, healed.stderr
    for dead, other in ((1, 0), (0, 1)):
        assert f"[rank {other}] stopping" in healed.stderr
        assert f": rank {dead} failed first" in healed.stderr
    assert "step_00000003: at iteration 3" in healed.stdout
    assert "step_00000006: at iteration 6" in healed.stdout
    assert weights(torchrun.result()) == weights(undisturbed)


@pytest.mark.prove
def test_a_run_on_two_nodes_is_healed(
    torchrun: Torchrun, undisturbed: Result, free_port: Callable[[], int]
) -> None:
    """Each has a torchrun of its own, and looks at what its own ranks left."""
    kill = {"0": {"fault": fault("update", 1, "kill") | {"from": 5, "call": 1}}}
    meet = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]

    def node(number: int) -> subprocess.CompletedProcess[str]:
        more = [*meet, "--node-rank", str(number), "--max-restarts", "2"]
        return torchrun.run(kill, *more, launcher=OURS, ranks=1)

    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(node, range(2)))
    assert [end.returncode for end in ends] == [0, 0], ends
    assert "rank 1 failed first" in ends[0].stderr
    assert "step_00000003: at iteration 3" in ends[0].stdout
    assert weights(torchrun.result()) == weights(undisturbed)


@pytest.mark.prove
def test_a_stopped_rank_is_ended_by_the_others_and_the_run_goes_on(
    torchrun: Torchrun, undisturbed: Result
) -> None:
    stop = fault("update", 1, "stop") | {"from": 5, "call": 1}
    more = ["--standalone", "--max-restarts", "1"]
    healed = torchrun.run({"0": {"fault": stop}}, *more, flags="--peer-timeout 6")
    assert healed.returncode == 0, healed.stderr
    assert "rank 1 failed first: no heartbeat for" in healed.stderr
    assert weights(torchrun.result()) == weights(undisturbed)


def ends(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines in which attempts, and the launcher, say why they end."""
    return re.findall(r"^(?:pretrain_llama|restarted_rank|torchrun).*?: .*$", run.stderr, re.M)


@pytest.mark.prove
def test_a_mistake_is_not_made_again(torchrun: Torchrun) -> None:
    """A mistake of the first attempt, and one of an attempt after a fault."""
    mistake = "--lr is 0.001 on rank 0 and 0.002 on rank 1: all ranks need the same value"
    again = f"not restarted, because the previous attempt ended with a mistake: {mistake}"
    flags = {"flags": {"1": ["--lr", "2e-3"]}}
    more = ["--standalone", "--max-restarts", "3"]
    first = torchrun.run({"0": flags}, *more, launcher=OURS)
    assert first.returncode == 2
    assert ends(first)[:2] == [f"pretrain_llama.py: {mistake}", f"restarted_rank.py: {again}"]
    assert re.fullmatch(r"torchrun: rank \d: (.*)", ends(first)[2])[1] == again  # type: ignore[index]
    later = torchrun.run({"0": {"fault": fault("update", 1, "kill")}, "1": flags}, *more,
                         launcher=OURS)  # fmt: skip
    assert later.returncode == 2 and ends(later)[:2] == ends(first)[:2]
    assert not (torchrun.folder / "saved" / step_name(STEPS)).exists()


@pytest.mark.prove
@pytest.mark.parametrize("point", ["build", "update"])
def test_an_attempt_that_made_no_step_is_the_last(torchrun: Torchrun, point: str) -> None:
    broken = fault(point, 1, "raise") | {"call": 1}
    run = torchrun.run({str(attempt): {"fault": broken} for attempt in range(4)},
                       "--standalone", "--max-restarts", "3", launcher=OURS)  # fmt: skip
    cause = r"completed no step: rank 1 failed first.*: RuntimeError: broken on purpose"
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 1, "it was started once"
    assert len(ends(run)) == 2, run.stderr
    said, last = ends(run)
    assert re.search(f"not restarted, because the previous attempt {cause}", said)
    assert re.fullmatch(rf"torchrun: rank \d: not restarted.*{cause}", last)
    assert run.stderr.endswith(f"{last}\n")


@pytest.mark.prove
@pytest.mark.parametrize("how, code", [("term", 143), ("usr1", 138)])
def test_a_signal_before_the_first_step_starts_nothing_again(
    torchrun: Torchrun, how: str, code: int
) -> None:
    signalled = {"point": "connect", "call": 1, "how": how, "rank": 1}
    run = torchrun.run({"0": {"fault": signalled}}, "--standalone", "--max-restarts", "3",
                       launcher=OURS)  # fmt: skip
    cause = rf"not restarted.*rank 1 failed first.*ended by a signal \(exit code {code}\)"
    assert run.returncode == 1 and re.search(cause, ends(run)[-1]), run.stderr
    assert run.stderr.endswith(f"{ends(run)[-1]}\n")
