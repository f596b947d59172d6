# SPDX-License-Identifier: Apache-2.0
"""Runs under a launcher of the user's: torchrun, killed or left to restart.

Every rank is a Python of its own here, so a start takes some seconds longer than elsewhere.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.scene import LIMIT, Scene, command, free_port
from tests.launcher import SCRIPT, Result, writers_into

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = "-m torch.distributed.run --nproc-per-node {ranks} --master-port {port}"
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "torchrun restarts": f"{TORCHRUN} --max-restarts 2",
}


class Program(Scene):
    """A run whose ranks the launcher starts that `kind.apart` names. It has one output for all."""

    process: subprocess.Popen[str] | None = None

    def start(self, inject: bool) -> None:
        """Start the launcher with the fault; the same command later is started as elsewhere."""
        if not inject:
            self.process = None
            super().start(inject)
            return
        words = LAUNCHERS[self.kind.apart].format(ranks=self.layout.ranks, port=free_port()).split()
        argv = [w.replace("{dir}", str(self.folder)) for w in command(self.layout, self.kind)]
        argv += ["--log-json", f"{self.folder}/log.jsonl"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT_FOLDER": str(self.folder)}
        self.began = time.monotonic()
        with open(self.folder / "out.0", "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *words, str(SCRIPT), json.dumps(self.faults()), *argv],
                cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True, text=True,
            )  # fmt: skip

    def over(self) -> bool:
        """Return whether the launcher and all of its ranks have ended, after a moment."""
        if self.process is None:
            return super().over()
        time.sleep(0.1)
        late = time.monotonic() - self.began > LIMIT
        if late:
            self.end_all()
        return self.process.poll() is not None and not writers_into(self.folder, patience=0.0)

    def end_all(self) -> None:
        """Kill what should have ended long before."""
        for pid in writers_into(self.folder, patience=0.0):
            os.kill(pid, signal.SIGKILL)

    def result(self) -> Result:
        """Return the launcher's exit code as that of every rank, which only it knows."""
        if self.process is None:
            return super().result()
        now, ranks = time.monotonic() - self.began, self.layout.ranks
        return Result(
            [self.process.wait()] * ranks, [now] * ranks, now > LIMIT, self.folder, self.began
        )

    def look_for_steps(self, first: bool, now: float) -> None:
        """Note the first new step after the fault; a launcher that restarts ranks brings it."""
        steps = self.log.poll()
        restarted = self.kind.promise.goes_on and self.seen.struck is not None
        if steps and self.seen.recovered is None and (restarted or not first):
            self.seen.recovered = now

    def kill_launcher(self) -> None:
        """Kill -9 the launcher alone."""
        assert self.process is not None
        self.process.kill()
