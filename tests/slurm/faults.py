# SPDX-License-Identifier: Apache-2.0
"""Faults inside a rank of a SLURM job, for tests/slurm/check.py: a hang, a flipped bit, a kill.

SITE is a sitecustomize.py on the jobs' PYTHONPATH. In rank 1 it waits for a file named `hang` or
`flip` in the job's folder, removes that, and does it to the trainer at its next step.
"""

import os
import signal
import time

from tests.slurm.cluster import Cluster
from tests.slurm.job import Job

HANG_TIMEOUT, NOTICED = 15.0, 25.0  # s: of the hung rank; more, for the job to be back in the queue
SITE = """
import os, sys, threading, time

def wait(folder):
    while not (found := [n for n in ("hang", "flip") if os.path.exists(f"{folder}/{n}")]):
        time.sleep(0.05)
    os.unlink(f"{folder}/{found[0]}")
    program = sys.modules["__main__"]
    step = program.train_step

    def strike(run, *rest):
        program.train_step = step
        if found[0] == "hang":
            time.sleep(3600)
        import torch

        with torch.no_grad():  # a bit of the first weight's first value
            next(run.model.parameters()).view(-1)[:1].view(torch.int32)[0] ^= 1 << 20
        return step(run, *rest)

    program.train_step = strike

if os.environ.get("SLURM_PROCID") == "1" and "SLURM_STEP_ID" in os.environ:
    threading.Thread(target=wait, args=(os.environ["WEFT_FAULTS"],), daemon=True).start()
"""


def prepare(cluster: Cluster) -> str:
    """Write what the cases need into the scratch directory.

    Return the name of a job script: the example, but without --use-distributed-optimizer, so that
    each rank holds all weights and moments.
    """
    (cluster.scratch / "site").mkdir()
    (cluster.scratch / "site" / "sitecustomize.py").write_text(SITE)
    with open("examples/cpu_two_nodes.slurm", encoding="utf-8") as file:
        text = file.read()
    replicated = cluster.scratch / "replicated.slurm"
    replicated.write_text(text.replace("--use-distributed-optimizer ", ""))
    return str(replicated)


def hung(cluster: Cluster, job: Job) -> tuple[float, float]:
    """Let rank 1 sleep in a step, its threads alive: --hang-timeout names it and ends the run."""
    began = time.monotonic()
    (job.folder / "hang").touch()
    job.put_back(1, HANG_TIMEOUT + NOTICED)
    stopped = time.monotonic() - began
    job.all_gone()
    job.must_say("rank 1 failed first", "back into the queue")
    return stopped, job.go_on()


def flipped(cluster: Cluster, job: Job) -> tuple[float, float]:
    """Flip a bit of a weight of rank 1: --check-replicas finds it, a replay tells its kind."""
    began = time.monotonic()
    (job.folder / "flip").touch()
    job.put_back(1, 60.0)
    stopped = time.monotonic() - began
    job.all_gone()
    job.must_say("replicas differ at iteration", "the fault was transient", "back into the queue")
    return stopped, job.go_on()


def killed(cluster: Cluster, job: Job) -> tuple[float, float]:
    """Kill -9 a rank: the other one says so and stops; the job script puts the job back."""
    began = time.monotonic()
    os.kill(max(cluster.ranks()), signal.SIGKILL)
    job.put_back(1, NOTICED)
    stopped = time.monotonic() - began
    job.all_gone()
    job.must_say("failed first: the process died (killed?)", "back into the queue")
    return stopped, job.go_on()
