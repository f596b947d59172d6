# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of failures: a small run on several ranks, its faults, the rank to blame."""

import json
from pathlib import Path
from typing import Any

from tests.launcher import Launcher, Result

LIMIT = 30.0  # seconds, the promise
PATIENCE = {"silence": 4.0, "grace": 0.5, "unwind": 0.5}  # of the failure channel, shortened
STEPS = 8
MODEL = (
    "--mock-data --vocab-size 500 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --lr 1e-3 --log-interval 1 --sequence-parallel --num-workers 2 "
    f"--eval-interval 2 --eval-iters 2 --train-iters {STEPS} --save-interval 3"
).split()
# the call of a point at which to strike: in one of the first 3 steps, after which the run saves
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
MESSAGES = ("receive", "wait", "send")  # points that only a pipeline passes


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


def fault(point: str, rank: int, how: str) -> dict[str, Any]:
    """Describe a fault."""
    return {"point": point, "rank": rank, "call": CALLS[point], "how": how}


def fault_during(doing: str, point: str, rank: int, how: str, call: int = 1) -> dict[str, Any]:
    """Describe a fault at a call of `point` while the rank says that it is doing this."""
    return {"point": point, "rank": rank, "call": call, "how": how, "during": doing}


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


def weights(result: Result, step: int = STEPS) -> dict[str, str]:
    """Return the hash of every file of tensors, weights and optimizer, of a checkpoint."""
    manifest = result.folder / "saved" / f"step_{step:08d}" / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    found = {name: f["sha256"] for name, f in files.items() if name.endswith(".safetensors")}
    assert found
    return found
