# SPDX-License-Identifier: Apache-2.0
"""torchrun --max-restarts heals a run: its store outlives the attempts, the attempts do not mix."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.small_run import MODEL, STEPS, fault

pytestmark = pytest.mark.prove
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/faults/restarted_rank.py"


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """torchrun(name, attempts, *options) -> the end of a run whose checkpoints are in `name`."""

    def run(name: str, attempts: dict[str, Any], *options: str) -> Any:
        argv = [*MODEL, "--tensor-model-parallel-size", "2", "--global-batch-size", "2"]
        argv += ["--save", f"{tmp_path}/{name}", "--load", f"{tmp_path}/{name}"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += [*options, SCRIPT, json.dumps(attempts), *argv]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    return run


def weights(folder: Path) -> dict[str, str]:
    """Return the hash of every file of tensors in the last checkpoint."""
    manifest = json.loads((folder / f"step_{STEPS:08d}" / "manifest.json").read_text())
    found = {n: f["sha256"] for n, f in manifest["files"].items() if n.endswith(".safetensors")}
    assert found
    return found


@pytest.mark.parametrize("options", [["--standalone"], ["--master-port", "PORT"]])
def test_a_run_whose_ranks_die_twice_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, torchrun: Any, free_port: Callable[[], int], options: list[str]
) -> None:
    options = [str(free_port()) if word == "PORT" else word for word in options]
    undisturbed = torchrun("undisturbed", {}, *options)
    assert undisturbed.returncode == 0, undisturbed.stderr
    attempts = {
        "0": {"fault": fault("update", 1, "kill") | {"from": 5, "call": 1}},
        "1": {"fault": fault("backward", 0, "kill") | {"from": 7, "call": 1}},
    }
    healed = torchrun("healed", attempts, *options, "--max-restarts", "2")
    assert healed.returncode == 0, healed.stderr
    for dead, other in ((1, 0), (0, 1)):
        assert f"[rank {other}] stopping" in healed.stderr
        assert f": rank {dead} failed first" in healed.stderr
    assert "step_00000003: at iteration 3" in healed.stdout
    assert "step_00000006: at iteration 6" in healed.stdout
    assert weights(tmp_path / "healed") == weights(tmp_path / "undisturbed")


def test_a_mistake_that_was_put_right_is_forgotten(torchrun: Any) -> None:
    attempts = {"0": {"flags": {"1": ["--lr", "2e-3"]}}}
    run = torchrun("saved", attempts, "--standalone", "--max-restarts", "1")
    assert run.returncode == 0, run.stderr
    assert "--lr is 0.001 on rank 0 and 0.002 on rank 1" in run.stderr


def test_a_mistake_of_a_later_attempt_is_found(tmp_path: Path, torchrun: Any) -> None:
    attempts = {
        "0": {"fault": fault("update", 1, "kill")},
        "1": {"flags": {"1": ["--lr", "2e-3"]}},
    }
    run = torchrun("saved", attempts, "--standalone", "--max-restarts", "1")
    assert run.returncode == 1
    assert "--lr is 0.001 on rank 0 and 0.002 on rank 1" in run.stderr
    assert not (tmp_path / "saved" / f"step_{STEPS:08d}").exists()
