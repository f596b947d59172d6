#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check on a real SLURM that a job resumes as if nothing had happened (`make slurm-check`).

Starts a SLURM of two nodes on this machine (tests/slurm/cluster.py) and submits the job script
examples/cpu_two_nodes.slurm undisturbed. Then it submits the script again for each of a
pre-emption, SIGUSR1 before the time limit, scancel, a node that dies, a killed rank, a hung rank
and a flipped bit. Each run must end with the undisturbed run's losses and weights, bit for bit. A
short run first measures how many steps make a run long enough. Before all of them the lines of
docs/data.md copy a pair of tokens to a node.

Exit code: 0 if all checks pass, 1 if one fails, 77 if no SLURM can be started here.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script, find its own parts

from tests.slurm import faults as slurm_faults
from tests.slurm import near_data
from tests.slurm.cluster import CheckError, Cluster, obstacle, wait_for
from tests.slurm.job import Job, codes

SKIPPED = 77
WARM, LENGTH = 100, 45.0  # steps of the short run; least seconds that the others train
KILL_WAIT, STOPPED, TICK = 30.0, 30.0, 60.0  # s: SLURM's grace; a survivor's; twice SLURM's clock
COLUMNS = ("disturbed by", "stopped", "went on", "lost", "exit code", "then")


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


def copied(cluster: Cluster) -> None:
    """Submit the lines of docs/data.md that copy a pair to a node: whole, and not twice."""
    far, near = cluster.scratch / "far", cluster.scratch / "near"
    far.mkdir()
    for end in ("bin", "idx"):
        (far / f"text.{end}").write_bytes(os.urandom(1 << 20))
    digests = cluster.ask("bash", "-c", f"cd {far} && sha256sum text.bin text.idx")
    (far / "text.sha256").write_text(digests + "\n")
    script = cluster.scratch / "copy.sh"
    script.write_text(
        f"#!/bin/bash\nDATA={far}/text NEAR={near}\n{near_data.lines()}"
        'cmp "$DATA.bin" "$1/text.bin"; cmp "$DATA.idx" "$1/text.idx"\n'
    )
    submit = ("sbatch", "--wait", "--nodes=1", "--output=/dev/null", str(script), str(far))
    cluster.ask(*submit)
    first = (near / "text.bin").stat()
    cluster.ask(*submit)
    if (near / "text.bin").stat().st_ino != first.st_ino:
        raise CheckError("a pair that was there was copied again")
    (far / "text.bin").write_bytes(os.urandom(1 << 20))
    (far / "text.sha256").touch()
    try:
        cluster.ask(*submit)
    except CheckError:
        kept = (near / "text.bin").stat().st_ino == first.st_ino
    else:
        kept = False
    if not kept:
        raise CheckError("a pair whose digest is another one was taken")
    print("a pair of tokens is copied to a node once, and refused where its digest differs")


class Case(NamedTuple):
    """A kind of disturbance. loses: whether steps are lost."""

    play: Callable[[Cluster, Job], tuple[float, float]]
    loses: bool = False
    flags: tuple[str, ...] = ()
    script: str = "examples/cpu_two_nodes.slurm"


CASES = {
    "pre-emption": Case(pre_empted),
    "the time limit": Case(out_of_time),
    "scancel": Case(cancelled),
    "a dead node": Case(node_lost, True),
    "a killed rank": Case(slurm_faults.killed, True),
    "a hung rank": Case(slurm_faults.hung, True, (f"--hang-timeout={slurm_faults.HANG_TIMEOUT}",)),
    "a flipped bit": Case(slurm_faults.flipped, True, ("--check-replicas=5",), "replicated"),
}


def check(cluster: Cluster, wanted: list[str]) -> bool:
    """Run all, print a line for each; return whether all checks passed."""
    copied(cluster)
    scripts = {"replicated": slurm_faults.prepare(cluster)}
    warm = Job(cluster, "warm-up", WARM)
    warm.finish()
    pace = statistics.quantiles((row["step_seconds"] for row in warm.rows()), n=10)[0]
    steps = int(LENGTH / pace)  # the fastest: the others may get faster
    oracles: dict[bool, Job] = {}  # by whether the optimizer is replicated
    for replicated in sorted({CASES[name].script in scripts for name in wanted}):
        began = time.monotonic()
        title = "undisturbed" + " replicated" * replicated
        more = {"script": scripts["replicated"]} if replicated else {}
        oracle = oracles[replicated] = Job(cluster, title, steps, **more)
        oracle.finish()
        if len(oracle.curve()) != steps or len(oracle.rows()) != steps:
            raise CheckError(f"the {title} run made {len(oracle.rows())} of {steps} steps")
        took = time.monotonic() - began
        print(f"{title}: {steps} steps, job done in {took:.0f} s, hash {oracle.weights()}")
    print("".join(f"{name:16}" for name in COLUMNS), flush=True)
    good = True
    for name in wanted:
        case = CASES[name]
        try:
            script = scripts.get(case.script, case.script)
            job = Job(cluster, name, steps, script, case.flags)
            job.reach(steps // 7)
            stopped, went_on = case.play(cluster, job)
            job.finish()
            replicated = case.script in scripts
            lost = job.compare(oracles[replicated], agree=not replicated)
            if (lost > 0) != case.loses or lost > 2 * job.every + 2:
                raise CheckError(f"{name}: {lost} steps were done twice")
            cells: tuple[str, ...] = (f"{stopped:.1f} s", f"{went_on:.1f} s", f"{lost} steps")
            cells += (codes(job), "the same bits")
        except CheckError as error:
            good, cells = False, (f"FAILED: {error}",)
            print(*job.said().splitlines()[-40:], sep="\n", file=sys.stderr)
            cluster.ask("scancel", "--user=root")
        print("".join(f"{cell:16}" for cell in (name, *cells)), flush=True)
    return good


def main() -> int:
    """Read the flags and run the checks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
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
