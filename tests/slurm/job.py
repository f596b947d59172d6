# SPDX-License-Identifier: Apache-2.0
"""Follow a run of an example's job script on a SLURM: for tests/slurm/check.py."""

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

from tests.slurm.cluster import CheckError, Cluster, wait_for

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 "
    "--seq-length 64 --vocab-size 500 --no-shared-memory"
).split()
PATIENCE = 600.0  # seconds for what may be slow on a busy machine


class Job:
    """One run of an example: a folder, and the jobs that work on it one after another.

    script: the example. flags: more for the trainer.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        steps: int,
        script: str = "examples/cpu_two_nodes.slurm",
        flags: Sequence[str] = (),
    ) -> None:
        self.cluster, self.folder = cluster, cluster.scratch / name.replace(" ", "_")
        self.script, self.flags = script, flags
        self.steps, self.every = steps, max(1, steps // 8)  # steps between two checkpoints
        self.folder.mkdir()
        self.submit()

    def submit(self) -> None:
        """Submit the job script, as a user does."""
        self.number = self.cluster.ask(
            "sbatch", "--parsable", f"--output={self.folder}/job.log",
            self.script, *FLAGS, *self.flags,
            f"--train-iters={self.steps}", f"--save-interval={self.every}",
            OUT=str(self.folder), MASTER_ADDR="127.0.0.1", WEFT_FAULTS=str(self.folder),
            PYTHONPATH=str(self.cluster.scratch / "site"),
        )  # fmt: skip

    def said(self) -> str:
        """Return the job's log."""
        log = self.folder / "job.log"
        return log.read_text() if log.exists() else ""

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def rows(self) -> list[dict[str, Any]]:
        """Return the log's row of every step; a step that was lost and done again has two."""
        log = self.folder / "log.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if "loss" in row]

    def reach(self, step: int) -> None:
        """Wait until the run has made so many steps. Raises CheckError if it ends before."""
        wait_for(
            f"step {step} of {self.folder.name}",
            PATIENCE,
            lambda: any(row["iteration"] >= step for row in self.rows()) or self._over(),
        )
        if not any(row["iteration"] >= step for row in self.rows()):
            raise CheckError(f"{self.folder.name} ended before step {step}")

    def _over(self) -> bool:
        return self.state() in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def put_back(self, times: int, seconds: float) -> None:
        """Wait until the job is back in the queue, after so many restarts."""

        def waiting() -> bool:
            known = self.cluster.job(self.number)
            return known["JobState"] == "PENDING" and known["Restarts"] == str(times)

        wait_for(f"{self.folder.name} is back in the queue", seconds, waiting)

    def go_on(self) -> float:
        """Start a queued job at once; return the seconds until it has made a step."""
        time.sleep(5.0)  # sooner, SLURM may still revoke the job's credential and end it
        began, before = time.monotonic(), len(self.rows())
        self.cluster.ask(
            "scontrol", "update", f"JobId={self.number}", "StartTime=now", "TimeLimit=30"
        )
        return self._first_row(began, before)

    def _first_row(self, began: float, before: int) -> float:
        name = self.folder.name
        wait_for(f"{name} goes on", PATIENCE, lambda: len(self.rows()) > before or self._over())
        if len(self.rows()) == before:
            raise CheckError(f"{name} ended where it had to go on")
        return time.monotonic() - began

    def start_again(self) -> float:
        """Submit the same job once more; return the seconds until it has made a step."""
        began, before = time.monotonic(), len(self.rows())
        self.submit()
        return self._first_row(began, before)

    def finish(self) -> None:
        """Wait for the end. Raises CheckError unless it is a success that leaves no process."""
        wait_for(f"{self.folder.name} ends", PATIENCE, self._over)
        known = self.cluster.job(self.number)
        if (known["JobState"], known["ExitCode"]) != ("COMPLETED", "0:0"):
            raise CheckError(f"{self.folder.name} is {known['JobState']} {known['ExitCode']}")
        self.all_gone()

    def all_gone(self) -> None:
        """Wait until no process of the job is left, neither a rank nor what SLURM started it by."""
        wait_for(f"what {self.folder.name} started ends", 40.0, self.cluster.no_jobs)

    def curve(self, agree: bool = True) -> dict[int, tuple[str, ...]]:
        """Return {step: its numbers in the log, without times}.

        A step that was done twice must agree with itself, or else its last row counts.
        """
        found: dict[int, tuple[str, ...]] = {}
        for row in self.rows():
            keys = ("loss", "grad_norm", "lr", "consumed_samples")
            mine = tuple(float(row[key]).hex() for key in keys)
            if agree and found.get(row["iteration"], mine) != mine:
                raise CheckError(f"{self.folder.name}: step {row['iteration']} done twice differs")
            found[row["iteration"]] = mine
        return found

    def weights(self) -> str:
        """Return a hash of the last checkpoint's tensors, of weights and optimizer."""
        manifest = self.folder / "checkpoints" / f"step_{self.steps:08d}" / "manifest.json"
        files = json.loads(manifest.read_text())["files"]
        tensors = {name: f["sha256"] for name, f in files.items() if name.endswith(".safetensors")}
        return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()[:16]

    def compare(self, oracle: "Job", agree: bool = True) -> int:
        """Check that this run's numbers are the oracle's; return how many steps were done twice."""
        mine, theirs = self.curve(agree), oracle.curve()
        if mine != theirs:
            step = min(s for s in theirs if mine.get(s) != theirs[s])
            raise CheckError(f"{self.folder.name}: step {step} is not the undisturbed run's")
        if self.weights() != oracle.weights():
            raise CheckError(f"{self.folder.name}: the weights are not the undisturbed run's")
        return len(self.rows()) - len(mine)

    def must_say(self, *texts: str) -> None:
        """Check that the log has all of these texts, and no traceback."""
        said = self.said()
        for text in texts:
            if text not in said:
                raise CheckError(f"{self.folder.name}: its log does not say {text!r}")
        if "Traceback" in said:
            raise CheckError(f"{self.folder.name}: a traceback in its log")


def codes(job: Job) -> str:
    """Return the exit codes that the job script logged, in order."""
    lines = [x for x in job.said().splitlines() if x.startswith("job ") and ": exit code " in x]
    return ", ".join(line.split(": exit code ")[1].split(",")[0] for line in lines)
