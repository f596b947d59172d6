# SPDX-License-Identifier: Apache-2.0
"""What takes long is told with growing intervals, one voice a host; what is quick, not at all."""

import itertools
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from mpu.comm.waits import Wait
from mpu.launch import Launch, Rendezvous
from training.faults import activity as module
from training.faults.activity import Activity
from training.faults.hang_detector import Status, elsewhere


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST", 0.1)
    monkeypatch.setattr(module, "LOOK", 0.01)


def until(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_long_work_is_told_at_growing_intervals_and_quick_work_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes on by a second at each look, once the long work has begun."""
    clock, told, opening = itertools.count(), list[str](), threading.Event()
    monkeypatch.undo()

    def monotonic() -> float:
        return float(next(clock)) if opening.is_set() else 0.0

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(module, "LOOK", 0.0001)
    with Activity(tell=told.append) as activity:
        for words in ("reading", "checking"):
            activity.what = words
        activity.what = "opening"
        opening.set()
        until(lambda: len(told) >= 8)
        activity.what = "going on"
    lines = [line for line in told if line.endswith(" s so far")]
    assert {line.split(":")[0].split(",")[0] for line in lines} <= {"opening", "going on"}
    lines = [line for line in lines if line.startswith("opening")]
    assert any(line.startswith("opening: done, after ") for line in told)
    seconds = [int(line.split()[-4]) for line in lines[:8]]
    assert 5 <= seconds[0] < 15
    for before, after in itertools.pairwise(seconds):
        assert after >= before + min(before, 300) and after < before + min(before, 300) + 20


def test_no_line_comes_once_the_start_is_over() -> None:
    told: list[str] = []
    with Activity(tell=told.append) as activity:
        activity.started()
        with activity.doing("reading"):
            time.sleep(0.3)
    assert not told


def test_of_several_ranks_on_a_host_one_tells_that_rank_0_does_not_come(
    free_port: Callable[[], int],
) -> None:
    point, told = Rendezvous("127.0.0.1", free_port()), dict[int, list[str]]()

    def wait(rank: int) -> None:
        launch = Launch(rank, 8, rank, 4, point=point)
        with Activity(launch, told.setdefault(rank, []).append).waiting(
            "rank 0", lambda: "waiting for rank 0", limit=600.0, over=lambda: "rank 0 has come"
        ):
            until(lambda: any(len(lines) > 1 for lines in told.values()))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    (lines,) = [lines for lines in told.values() if lines]
    assert re.fullmatch(r"\[rank \d on .+\] waiting for rank 0: waited 0 s of 600 s", lines[0])
    assert lines[-1].endswith("rank 0 has come, after 0 s")


def test_where_the_others_are_is_told_by_rank_0() -> None:
    wait = Wait("all_gather", "world", (0, 1, 2, 3), 5)
    waiting = [Status(r, "loading", stuck=9.0, wait=wait, started={"world": 5}) for r in range(4)]
    assert elsewhere(waiting) == ""
    late = Status(2, "reading step_3", stuck=9.0, line="load.py:7 (read)", started={"world": 4})
    moving = Status(3, "reading step_3")
    assert elsewhere([*waiting[:2], late, waiting[3]]) == (
        "waiting for others: rank 2 is at: reading step_3 (load.py:7 (read))"
    )
    assert elsewhere([*waiting[:3], moving]) == "waiting for others: rank 3 is at: reading step_3"
    mine = [Status(r, "building", stuck=9.0, line="llama.py:3 (f)") for r in range(4)]
    assert elsewhere(mine) == "" and elsewhere([mine[0], *waiting[1:]]) == ""
    there = Status(1, "connecting", stuck=9.0, line="grid.py:9 (connect)")
    assert elsewhere([mine[0], there, mine[2], mine[3]]) == (
        "rank 1 is at: connecting (grid.py:9 (connect))"
    )
