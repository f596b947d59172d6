# SPDX-License-Identifier: Apache-2.0
"""Start the program on several ranks from a test: the parent's side of tests/run_ranks.py."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent / "run_ranks.py"


@dataclass
class Result:
    """How a job went: per rank its exit code, when it ended, what it said.

    began: time.monotonic() of the start, from which `ended` counts. late: ranks were killed, as
    they had not ended in time.
    """

    codes: list[int]
    ended: list[float]
    late: bool
    folder: Path
    began: float = 0.0

    def said(self, rank: int, kind: str = "err") -> str:
        """Return what a rank wrote."""
        return (self.folder / f"{kind}.{rank}").read_text()

    def orphans(self, patience: float = 5.0) -> list[int]:
        """List the processes that still write into this job's output, after so many seconds."""
        return writers_into(self.folder, patience)

    def saved(self) -> list[str]:
        """List the checkpoints."""
        return sorted(path.name for path in (self.folder / "saved").glob("step_*"))

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the JSON log."""
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    def losses(self) -> list[tuple[Any, ...]]:
        """Return what the log says of every step, in its own order, but for times and speeds."""
        keys = ("iteration", "consumed_samples", "loss", "grad_norm", "lr", "validation_loss")
        return [tuple(row.get(key) for key in keys) for row in self.rows()]


def writers_into(folder: Path, patience: float) -> list[int]:
    """List the processes whose stdout is a file of `folder`, after at most so many seconds.

    Whoever a rank left behind has it.
    """
    deadline = time.monotonic() + patience
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if Path(os.readlink(process / "fd" / "1")).parent == folder:
                    found.append(int(process.name))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


class Launcher:
    """A process that forks ranks, one job at a time; each job has a folder.

    context: of multiprocessing, to start the process with; without one it is a new Python.
    """

    def __init__(
        self, folder: Path, free_port: Callable[[], int], context: BaseContext | None = None
    ) -> None:
        self.folder, self.free_port, self.jobs = folder, free_port, 0
        (reads, asks), (answers, writes) = os.pipe(), os.pipe()
        if context is None:
            self.process: Any = subprocess.Popen(
                [sys.executable, str(SCRIPT)],
                stdin=reads,
                stdout=writes,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self.wait_for_end = self.process.wait
            os.close(reads), os.close(writes)
        else:
            from tests import run_ranks

            ends = Connection(reads, writable=False), Connection(writes, readable=False)
            self.process = context.Process(target=run_ranks.serve, args=ends)
            self.process.start()
            self.wait_for_end = self.process.join
            ends[0].close(), ends[1].close()
        self.asks, self.answers = os.fdopen(asks, "w"), os.fdopen(answers)
        assert self.answers.readline() == "ready\n"

    def start(self, ranks: int, argv: list[str], folder: Path | None = None, **job: Any) -> Path:
        """Start a job; return its folder, that of an earlier one if it is named.

        argv: the program's flags; {dir} stands for the folder. It keeps its log in log.jsonl. job:
        what else run_ranks.py knows of (fault, monitor, timeout, ...).
        """
        self.jobs += 1
        self.here = folder or self.folder / str(self.jobs)
        self.here.mkdir(exist_ok=True)
        for old in [*self.here.glob("pid.*"), *self.here.glob("struck.*")]:
            old.unlink()
        self.port = self.free_port()
        argv = [word.replace("{dir}", str(self.here)) for word in argv]
        if "--log-json" not in argv:
            argv += ["--log-json", f"{self.here}/log.jsonl"]
        job |= {"ranks": ranks, "argv": argv, "dir": str(self.here), "port": self.port}
        self.asks.write(json.dumps(job) + "\n")
        self.asks.flush()
        return self.here

    def over(self, seconds: float) -> bool:
        """Return whether the job has ended, after at most so many seconds."""
        return bool(select.select([self.answers], [], [], seconds)[0])

    def wait(self, in_time: bool = True) -> Result:
        """Wait for the job's end. in_time: it is an error if ranks had to be killed."""
        result = Result(**json.loads(self.answers.readline()), folder=self.here)
        words = [result.said(rank) for rank in range(len(result.codes))]
        assert not (in_time and result.late), f"a rank hung: {words}"
        return result

    def run(self, *args: Any, **job: Any) -> Result:
        """Start a job and wait for its end."""
        self.start(*args, **job)
        return self.wait()

    def python(
        self, *words: Any, cwd: Path = SCRIPT.parents[1], env: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Return what `python WORDS...` did: a script, or -c and code, with arguments.

        It has no input. Its process has imported the program, which takes longer than most scripts.
        """
        more = {"OMP_NUM_THREADS": "1"}
        env = {**os.environ, **more} if env is None else env
        argv = [str(word) for word in words]
        found = self.run(1, [], python=argv, cwd=str(cwd), env=env)
        return subprocess.CompletedProcess(
            argv, found.codes[0], found.said(0, "out"), found.said(0)
        )

    def close(self) -> None:
        """Let the process end."""
        self.asks.close()
        self.wait_for_end(60)
