# SPDX-License-Identifier: Apache-2.0
"""Kill ranks that share memory (kill -9, Ctrl-C): the others learn at once who died.

They do so though the dead one is a zombie. The memory never has a name in /dev/shm.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("killable_ranks.py")
PATIENCE = 60.0  # seconds, for what takes a second


class Ranks:
    """The ranks of one job."""

    def __init__(self, server: Any, ranks: int, do: str, folder: Path) -> None:
        self.folder = folder
        job = {"ranks": ranks, "do": do, "folder": str(folder)}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        self.pids = json.loads(server.stdout.readline())

    def said(self, rank: int, what: str, times: int = 1) -> tuple[float, str]:
        """Wait until a rank has said something for so many times; return when, and its text."""
        end, file = time.monotonic() + PATIENCE, self.folder / f"said.{rank}"
        while time.monotonic() < end:
            lines = file.read_text().split("\n")[:-1] if file.exists() else []
            found = [row for row in map(json.loads, lines) if row[0] == what]
            if len(found) >= times:
                return found[times - 1][1], found[times - 1][2]
            time.sleep(0.01)
        pytest.fail(f"rank {rank} did not say {what!r}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        for pid in self.pids:
            os.kill(pid, number)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    words = [sys.executable, str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(60)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def shared_names(pid: int) -> set[str]:
    """Return the names of what a process maps or holds open that others could map too."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in maps if " rw-s " in line}
    fds = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return names | {name for name in fds if "shm" in name or "memfd" in name}


def names() -> set[str]:
    """List /dev/shm, but for the semaphores of Python's multiprocessing, which come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def killed(server: Any, folder: Path, do: str) -> None:
    before = names()
    ranks = Ranks(server, 4, do, folder)
    try:
        for rank in range(4):
            ranks.said(rank, "ready")
        assert names() <= before
        for pid in ranks.pids:
            assert shared_names(pid) == {"/memfd:weft (deleted)"}
        time.sleep(0.05)
        at = time.monotonic()
        os.kill(ranks.pids[2], signal.SIGKILL)
        for rank in (0, 1, 3):
            when, text = ranks.said(rank, "error")
            assert "rank 2 has ended; this rank waited in " in text
            assert when - at < 2, f"rank {rank} took {when - at:.2f} s"
        assert state(ranks.pids[2]) == "Z"
        assert names() <= before
    finally:
        ranks.kill()
    end = time.monotonic() + PATIENCE
    while any(state(pid) != "Z" for pid in ranks.pids):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert names() <= before


def test_a_killed_rank_is_named_within_two_seconds(server, tmp_path):
    killed(server, tmp_path, "gather")


@pytest.mark.prove
@pytest.mark.parametrize("do", ["reduce", "barrier", "hold"])
def test_wherever_the_others_wait(server, tmp_path, do):
    killed(server, tmp_path, do)


def test_an_interrupt_ends_a_wait(server, tmp_path):
    """It ends long before the wait's own limit, which is longer than our patience."""
    ranks = Ranks(server, 2, "wait", tmp_path)
    try:
        for i in range(1, 6):
            ranks.said(0, "ready", i)
            time.sleep(0.05)
            os.kill(ranks.pids[0], signal.SIGINT)
            ranks.said(0, "interrupted", i)
    finally:
        ranks.kill()
