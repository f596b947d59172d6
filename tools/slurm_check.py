#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check on a real SLURM that a job resumes as if nothing had happened (`make slurm-check`).

Starts a SLURM of two nodes on this machine (tools/slurm_cluster.py) and submits the job script
examples/cpu_two_nodes.slurm undisturbed. Then it submits the script again for each of a
pre-emption, SIGUSR1 before the time limit, scancel, and a node that dies. Each run must end with
the undisturbed run's losses and weights, bit for bit. A short run first measures how many steps
make a run long enough.

Exit code: 0 if all checks pass, 1 if one fails, 77 if no SLURM can be started here.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from tools.slurm_cluster import CheckError, Cluster, obstacle, wait_for

SKIPPED = 77
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 "
    "--seq-length 64 --vocab-size 500 --no-shared-memory"
).split()
WARM, LENGTH = 100, 45.0  # steps of the short run; least seconds that the others train
PATIENCE = 600.0  # seconds for what may be slow on a busy machine
KILL_WAIT, STOPPED, TICK = 30.0, 30.0, 60.0  # s: SLURM's grace; a survivor's; twice SLURM's clock
COLUMNS = ("disturbed by", "stopped", "went on", "lost", "exit code", "then")


class Job:
    """One run of the example: a folder, and the jobs that work on it one after another."""

    def __init__(self, cluster: Cluster, name: str, steps: int) -> None:
        self.cluster, self.folder = cluster, cluster.scratch / name.replace(" ", "_")
        self.steps, self.every = steps, max(1, steps // 8)  # steps between two checkpoints
        self.folder.mkdir()
        self.submit()

    def submit(self) -> None:
        """Submit the job script, as a user does."""
        self.number = self.cluster.ask(
            "sbatch", "--parsable", f"--output={self.folder}/job.log",
            "examples/cpu_two_nodes.slurm", *FLAGS,
            f"--train-iters={self.steps}", f"--save-interval={self.every}",
            OUT=str(self.folder), MASTER_ADDR="127.0.0.1",
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

    def curve(self) -> dict[int, tuple[str, ...]]:
        """Return {step: its numbers in the log, without times}; a step done twice must agree."""
        found: dict[int, tuple[str, ...]] = {}
        for row in self.rows():
            keys = ("loss", "grad_norm", "lr", "consumed_samples")
            mine = tuple(float(row[key]).hex() for key in keys)
            if found.setdefault(row["iteration"], mine) != mine:
                raise CheckError(f"{self.folder.name}: step {row['iteration']} done twice differs")
        return found

    def weights(self) -> str:
        """Return a hash of the last checkpoint's tensors, of weights and optimizer."""
        manifest = self.folder / "checkpoints" / f"step_{self.steps:08d}" / "manifest.json"
        files = json.loads(manifest.read_text())["files"]
        tensors = {name: f["sha256"] for name, f in files.items() if name.endswith(".safetensors")}
        return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()[:16]

    def compare(self, oracle: "Job") -> int:
        """Check that this run's numbers are the oracle's; return how many steps were done twice."""
        mine, theirs = self.curve(), oracle.curve()
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


def pre_empted(cluster: Cluster, job: Job) -> tuple[float, float]:
    """Pre-empt the job by one of a higher partition: SIGTERM; SLURM puts it back."""
    began = time.monotonic()
    urgent = cluster.ask(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive",
        "--output=/dev/null", "--wrap=sleep 2",
    )  # fmt: skip
    job.put_back(1, KILL_WAIT)
    stopped = time.monotonic() - began
    job.all_gone()
    wait_for("the urgent job ends", 30, lambda: cluster.job(urgent)["JobState"] == "COMPLETED")
    job.must_say("stopped by SIGTERM after iteration", "DUE TO PREEMPTION", "so left to SLURM")
    return stopped, job.go_on()


def out_of_time(cluster: Cluster, job: Job) -> tuple[float, float]:
    """Bring the time limit near: SIGUSR1; the job script puts the job back."""
    began = time.monotonic()
    cluster.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=5")  # the script's 300 s
    job.put_back(1, TICK)
    stopped = time.monotonic() - began
    job.all_gone()
    job.must_say("stopped by SIGUSR1 after iteration", "back into the queue")
    return stopped, job.go_on()


def cancelled(cluster: Cluster, job: Job) -> tuple[float, float]:
    """Cancel the job: SIGTERM; it does not come back until somebody submits it again."""
    began = time.monotonic()
    cluster.ask("scancel", job.number)
    wait_for("the job script ends", KILL_WAIT, lambda: codes(job) == "75")
    stopped = time.monotonic() - began
    job.all_gone()
    job.must_say("stopped by SIGTERM after iteration", "so left to SLURM")
    time.sleep(3.0)  # in which it would come back
    known = cluster.job(job.number)
    if (known["JobState"], known["Restarts"]) != ("CANCELLED", "0"):
        raise CheckError(f"after scancel the job is {known['JobState']}")
    return stopped, job.start_again()


def node_lost(cluster: Cluster, job: Job) -> tuple[float, float]:
    """Kill -9 a node's slurmd and all under it: the other node's rank says so, and stops."""
    began = time.monotonic()
    cluster.kill_node("n2")
    wait_for("the survivor stops", STOPPED, lambda: not cluster.ranks())
    stopped = time.monotonic() - began
    job.put_back(1, 120.0)
    job.all_gone()
    job.must_say("rank 1 failed first: the process died (killed?)")
    cluster.start_node("n2")
    wait_for("the node is back", 60, lambda: cluster.ask("sinfo", "-h", "-o", "%D %T") == "2 idle")
    time.sleep(20.0)  # SLURM 22.05 gives a job that it starts at once a step of one node
    return stopped, job.go_on()


EVENTS = {
    "pre-emption": pre_empted,
    "the time limit": out_of_time,
    "scancel": cancelled,
    "a dead node": node_lost,
}


def check(cluster: Cluster, wanted: list[str]) -> bool:
    """Run all, print a line for each; return whether all checks passed."""
    warm = Job(cluster, "warm-up", WARM)
    warm.finish()
    pace = statistics.quantiles((row["step_seconds"] for row in warm.rows()), n=10)[0]
    steps, began = int(LENGTH / pace), time.monotonic()  # the fastest: the others may get faster
    oracle = Job(cluster, "undisturbed", steps)
    oracle.finish()
    if len(oracle.curve()) != steps or len(oracle.rows()) != steps:
        raise CheckError(f"the undisturbed run made {len(oracle.rows())} of {steps} steps")
    took = time.monotonic() - began
    print(f"undisturbed: {steps} steps, job done in {took:.0f} s, hash {oracle.weights()}")
    print("".join(f"{name:16}" for name in COLUMNS), flush=True)
    good = True
    for name in wanted:
        try:
            job = Job(cluster, name, steps)
            job.reach(steps // 7)
            stopped, went_on = EVENTS[name](cluster, job)
            job.finish()
            lost = job.compare(oracle)
            if (lost > 0) != (name == "a dead node") or lost > job.every + 2:
                raise CheckError(f"{name}: {lost} steps were done twice")
            cells: tuple[str, ...] = (f"{stopped:.1f} s", f"{went_on:.1f} s", f"{lost} steps")
            cells += (codes(job), "the same bits")
        except CheckError as error:
            good, cells = False, (f"FAILED: {error}",)
            print(*job.said().splitlines()[-40:], sep="\n", file=sys.stderr)
            cluster.ask("scancel", "--user=root")
        print("".join(f"{cell:16}" for cell in (name, *cells)), flush=True)
    return good


def codes(job: Job) -> str:
    """Return the exit codes that the job script logged, in order."""
    lines = [line for line in job.said().splitlines() if ": exit code " in line]
    return ", ".join(line.split(": exit code ")[1].split(",")[0] for line in lines)


def main() -> int:
    """Read the flags and run the checks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=EVENTS, default=list(EVENTS))
    parser.add_argument("--keep", action="store_true", help="keep the scratch directory")
    args = parser.parse_args()
    if why := obstacle():
        print(f"make slurm-check: {why}", file=sys.stderr)
        return SKIPPED
    with Cluster(args.keep) as cluster:
        if args.keep:
            print(f"everything is kept in {cluster.scratch}")
        try:
            return 0 if check(cluster, args.only) else 1
        except CheckError as error:
            print(f"make slurm-check: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
