# SPDX-License-Identifier: Apache-2.0
"""Fork ranks that share memory and may be killed: a script, not a test.

A job is a JSON line on stdin: {"ranks", "do", "folder"}; the answer is the ranks' process ids. A
rank writes its messages to FOLDER/said.R, a JSON line each: [what, monotonic seconds, text].
Ranks are not waited for (a killed one stays a zombie) until this process ends.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mpu.comm.collectives import all_gather, all_reduce  # noqa: E402
from mpu.comm.transport import Axis, CommunicationError  # noqa: E402
from mpu.connect import share  # noqa: E402
from mpu.grid import Grid, Launch  # noqa: E402

Say = Callable[..., None]


def gather(axis: Axis, say: Say) -> None:
    """Gather without end, and half of the time without waiting."""
    for i in range(1 << 30):
        _, handle = all_gather(torch.ones(i % 1000), axis, async_op=bool(i % 3))
        if i == 10:
            say("ready")
        if i % 2:
            handle.wait()


def reduce(axis: Axis, say: Say) -> None:
    for i in range(1 << 30):
        all_reduce(torch.ones(i % 1000), axis)
        if i == 10:
            say("ready")


def barrier(axis: Axis, say: Say) -> None:
    for i in range(1 << 30):
        axis.transport.workspace.buffer.barrier()
        if i == 10:
            say("ready")


def hold(axis: Axis, say: Say) -> None:
    """Begin turns until a slot is needed that rank 2 never closes."""
    handles = [all_gather(torch.ones(9), axis, async_op=True)[1] for _ in range(2)]
    say("ready")
    if axis.rank == 2:
        signal.pause()
    handles += [all_gather(torch.ones(9), axis, async_op=True)[1]]


def wait(axis: Axis, say: Say) -> None:
    """Wait for rank 1, again after each interruption."""
    while True:
        try:
            say("ready")
            if axis.rank == 1:
                signal.pause()
            axis.transport.workspace.buffer.wait(1, 2, "vain")
        except KeyboardInterrupt:
            say("interrupted")


def be_rank(job: dict[str, Any], rank: int) -> None:
    """Become one rank of a job; does not return."""
    folder, size = Path(job["folder"]), job["ranks"]
    said = open(folder / f"said.{rank}", "w", buffering=1)

    def say(what: str, text: str = "") -> None:
        said.write(json.dumps([what, time.monotonic(), text]) + "\n")

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    limit, launch = timedelta(seconds=600), Launch(rank, size, rank, size)
    store = dist.FileStore(str(folder / "store"), size)
    grid = Grid(size, launch=launch).connect(torch.device("cpu"), store, limit)
    assert share(grid, limit) == [f"collectives of dp_cp ({size} ranks): shared memory"]
    try:
        globals()[job["do"]](grid.dp_cp, say)
    except CommunicationError as error:
        say("error", str(error))
    signal.pause()


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        job, pids = json.loads(line), []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                try:
                    be_rank(job, rank)
                finally:
                    os._exit(1)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main()
