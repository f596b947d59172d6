# SPDX-License-Identifier: Apache-2.0
"""Who hangs, from what ranks say of themselves, and what a rank says; tests/faults/test_hangs.py
has real runs.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpu.comm.transport import blocked
from mpu.comm.waits import Wait, Waits
from training.faults import hang_watch
from training.faults.activity import own_line
from training.faults.hang_detector import HangDetector, Status, find, silence, watch_alone
from training.faults.hang_watch import FACTOR, HangWatch
from training.faults.process import Dump, Process

ROOT = Path(__file__).resolve().parents[3]
LINE = "training/data/loader.py:60 (next_global_batch)"


def waits(
    rank: int, stuck: float, axis: str, peers: tuple[int, ...], number: int, **counts: int
) -> Status:
    """Return a rank that waits in a collective, or, where number is 0, for a message."""
    verb = "all_gather" if number else "receive"
    started = counts or {axis: number}
    return Status(
        rank,
        f"step of {rank}",
        phase="step",
        stuck=stuck,
        wait=Wait(verb, axis, peers, number),
        started=started,
        line=f"mpu/comm/transport.py:{rank} (wait)",
    )


def where(rank: int, stuck: float, kind: str = "compute", action: str = "it") -> Status:
    return Status(rank, action, phase="step", stuck=stuck, kind=kind, line=LINE)


def test_who_stands_still_and_waits_for_nobody_hangs() -> None:
    ranks = [
        waits(0, 30.1, "tp", (0, 1), 8),
        waits(1, 30.2, "dp", (1, 3), 4),
        waits(2, 30.0, "tp", (2, 3), 8),
        where(3, 30.5, "data", "reading the data of iteration 7"),
    ]
    hang = find(ranks)
    assert hang is not None and hang.ranks == (3,)
    assert hang.action == "reading the data of iteration 7"
    assert hang.text == (
        f"rank 3 hangs in the phase step: in the data loader at {LINE}, for 30.5 s; ranks 0 to "
        "2 wait in all_gather 8 over tp"
    )


def test_a_rank_that_works_since_a_while_is_not_what_stopped_the_others_long_ago() -> None:
    ranks = [waits(0, 60.0, "tp", (0, 1), 8), where(1, 20.0)]
    assert find(ranks) is None


def test_the_end_of_a_chain_of_messages_is_named() -> None:
    """0 waits for 1, which waits for 2, which never came to a collective of 2 and 3."""
    ranks = [
        waits(0, 31.0, "pp_back", (1,), 0, tp=5),
        waits(1, 32.0, "pp_back", (2,), 0, tp=5),
        waits(2, 33.0, "tp", (2, 3), 6),
        waits(3, 34.0, "dp", (3,), 2, tp=5, dp=2),
    ]
    hang = find(ranks)
    assert hang is not None and hang.ranks == (3,)
    assert "rank 3 hangs in the phase step: in all_gather 2 over dp" in hang.text


def test_a_collective_counts_as_hanging_from_when_the_last_rank_has_entered_it() -> None:
    early = waits(0, 23.0, "tp", (0, 1), 8)
    assert find([early, waits(1, 0.2, "tp", (0, 1), 8)]) is None
    hang = find([early, waits(1, 5.0, "tp", (0, 1), 8)])
    assert hang is not None and (hang.ranks, hang.stuck) == ((0,), 5.0)
    assert "which every rank has entered and which does not complete" in hang.text


def test_ranks_that_wait_for_each_other_are_named_together() -> None:
    ranks = [waits(0, 31.0, "pp_back", (1,), 0, tp=5), waits(1, 30.0, "pp", (0,), 0, tp=5)]
    hang = find(ranks)
    assert hang is not None and hang.ranks == (0, 1)
    assert "ranks 0 and 1, which is every rank, hang in the phase step: in a receive" in hang.text
    assert "which has not come from rank 1" in hang.text


def test_ranks_that_hang_at_once_are_named_together_where_a_beat_came_between() -> None:
    """An action is seen at the first beat after it began, which differs from rank to rank."""
    first, second = where(0, 8.9), where(1, 7.6)
    hang = find([first, second])
    assert hang is not None and hang.ranks == (0,)
    fields = {"phase": "step", "stuck": 7.6, "unsure": 0.8, "kind": "compute"}
    hang = find([first, Status.of(1, "it", fields, 0.0)])
    assert hang is not None and hang.ranks == (0, 1)
    hang = find([first, Status.of(1, "something else", fields, 0.0)])
    assert hang is not None and hang.ranks == (0,)


def test_all_ranks_at_once_are_named_together() -> None:
    hang = find([where(r, 30.0 + r / 10) for r in range(5)])
    assert hang is not None and hang.ranks == (0, 1, 2, 3, 4)
    assert hang.text.startswith("ranks 0 to 4, which is every rank, hang in the phase")


def test_a_rank_in_communication_without_a_wait_is_named_only_if_no_other_stands() -> None:
    ranks = [waits(0, 30.0, "tp", (0, 1), 8), where(1, 30.2, "communication")]
    hang = find(ranks)
    assert hang is not None and hang.ranks == (1,)
    hang = find([*ranks, where(2, 29.9, "data")])
    assert hang is not None and hang.ranks == (2,)


def said(stuck: float, limit: float | None, phase: str = "step") -> str:
    return json.dumps({"phase": phase, "stuck": stuck, "limit": limit, "kind": "compute"})


@pytest.mark.parametrize(
    "phase, stuck, limit, timeout, speaks, ends",
    [
        ("step", 31.0, 30.0, None, True, False),
        ("step", 29.0, 30.0, None, False, False),
        ("step", 31.0, None, None, False, False),
        ("step", 601.0, None, None, True, True),
        ("set-up", 31.0, None, 10.0, False, False),
        ("set-up", 601.0, None, 10.0, True, True),
        ("step", 11.0, 30.0, 10.0, True, True),
        ("step", 11.0, None, 10.0, True, True),
    ],
)
def test_a_hang_is_spoken_of_past_its_limit_and_ends_the_run_past_the_timeout(
    phase: str, stuck: float, limit: float | None, timeout: float | None, speaks: bool, ends: bool
) -> None:
    detector = HangDetector(600.0, timeout)
    detector.hear(0, "status", said(stuck, limit, phase))
    hang, over = detector.look([(0, "work", 0.0)], 10.0)
    assert ((hang is not None), over) == (speaks, ends)


def test_a_hang_is_spoken_of_once_until_the_rank_moves() -> None:
    detector, now, heard = HangDetector(600.0, None), 0.0, []
    for stuck in (29.0, 31.0, 35.0, 0.1, 29.0, 31.0):
        detector.hear(0, "status", said(stuck, 30.0))
        now += 1.0
        heard.append(detector.look([(0, "work", 0.0)], now)[0] is not None)
    assert heard == [False, True, False, False, False, True]


def test_limits_are_learnt_for_each_phase() -> None:
    watch = HangWatch(floor=0.05)
    assert watch.limit() is None  # set-up
    watch.enter("data")
    assert watch.limit() is None
    time.sleep(0.02)
    watch.enter("step")
    assert watch.limit() is None
    watch.enter("data")
    limit = watch.limit()
    assert limit is not None and limit >= 0.02 * FACTOR
    watch.enter("step")
    assert watch.limit() == 0.05  # the least
    watch.enter("save")
    assert watch.limit() is None


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Do it in a thread, as the monitor does, so that this one stands in no code of the watch."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_rank_that_moves_says_little_and_one_that_stands_says_where() -> None:
    watch = HangWatch()
    watch.enter("step")
    assert watch.status("", 1.0).keys() == {"phase", "stuck"}
    watch._moved = watch.waits.moved = time.monotonic() - 30
    status = in_a_thread(lambda: watch.status("", 1.0))
    assert status["stuck"] >= 30 and status["kind"] == "compute" and status["wait"] is None
    wait = Wait("all_gather", "tp", tuple(range(0, 4096, 2)), 1)
    with blocked(watch.waits, wait), blocked(watch.waits, wait):
        text = json.dumps(in_a_thread(lambda: watch.status("", 1.0)))
    assert len(text) < 500, "it is one field of one message"
    assert Wait.packed(json.loads(text)["wait"]) == wait
    assert watch.status("", 1.0)["stuck"] < 25, "the end of a wait is movement"
    watch.waits.moved -= 30
    words = "the update of iteration 7"
    assert watch.status(words, 1.0)["stuck"] == 0, "and so is another action"
    watch._moved -= 30
    status = in_a_thread(lambda: watch.status(words, 1.0))
    assert status["stuck"] >= 30 and 0 < status["unsure"] <= 2
    watch.waits.moved = time.monotonic() - 20
    status = in_a_thread(lambda: watch.status(words, 1.0))
    assert 20 <= status["stuck"] < 30 and status["unsure"] == 0, "a wait's end is known exactly"


def test_a_process_that_was_stopped_does_not_hang_when_it_goes_on() -> None:
    watch = HangWatch()
    watch._moved = watch.waits.moved = time.monotonic() - 3600
    watch._queried = time.monotonic() - 3600
    assert watch.status("", 1.0)["stuck"] == 0


def test_reading_files_is_movement_in_set_up_and_while_saving(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = HangWatch()
    watch.status("", 1.0)
    cases = ("save", "", True), ("step", "", False), ("evaluation", "checkpoint", True)
    for phase, kind, moves in cases:
        watch.enter(phase)
        if kind:  # it waits for a save behind the training, or for an export
            monkeypatch.setattr(watch, "place", lambda kind=kind: (kind, "", []))
        watch._moved = watch.waits.moved = time.monotonic() - 30
        watch.status("", 1.0)
        watch._moved = watch.waits.moved = time.monotonic() - 30
        (tmp_path / "file").write_bytes(b"0" * (2 << 20))
        assert (watch.status("", 1.0)["stuck"] == 0) is moves


def test_waits_of_other_threads_are_not_counted() -> None:
    waits, wait = Waits(), Wait("send", "pp", (1,), 0)

    def wait_there() -> Wait | None:
        with blocked(waits, wait):
            return waits.now

    assert in_a_thread(wait_there) is None and waits.seconds == {}
    assert wait_there() == wait and waits.seconds["pp"] >= 0 and waits.now is None


def test_the_line_of_our_code_is_the_innermost_that_is_no_librarys() -> None:
    place: dict[int, Any] = {}

    def code(file: str, line: int, function: str, back: Any = None) -> Any:
        return SimpleNamespace(
            f_code=SimpleNamespace(co_filename=file, co_name=function), f_lineno=line, f_back=back
        )

    root = os.path.dirname(hang_watch.__file__).removesuffix("/training/faults")
    main = code(f"{root}/pretrain_llama.py", 9, "train")
    loader = code(f"{root}/training/data/loader.py", 70, "next_global_batch", main)
    place[1] = code(threading.__file__, 320, "wait", loader)
    kind, line, frames = hang_watch.place_of(place, 1, "data")
    assert (kind, line) == ("data", "training/data/loader.py:70 (next_global_batch)")
    assert frames == [line, "pretrain_llama.py:9 (train)"]
    assert hang_watch.place_of({1: main}, 1, "step")[0] == "compute"
    comm = code(f"{root}/mpu/comm/p2p.py", 5, "put", main)
    assert hang_watch.place_of({1: comm}, 1, "step")[0] == "communication"
    assert own_line("/home/me/my_llama.py", 3, "forward") == "/home/me/my_llama.py:3 (forward)"


HOLDER = """
import ctypes, json, threading
from training.faults.process import Dump
dump = Dump(threading.get_ident())
dump.arm(0.2)
print(json.dumps(dump.address()), flush=True)
def hold():
    ctypes.PyDLL(None).sleep(600)
hold()
"""


def child_of(code: str, tmp_path: Path) -> "subprocess.Popen[str]":
    """Run code as a file of its own, which is the user's code."""
    file = tmp_path / "holder.py"
    file.write_text(code)
    return subprocess.Popen(
        [sys.executable, str(file)], env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_process_whose_python_stands_still_is_read_and_ended(tmp_path: Path) -> None:
    """Its stack comes from faulthandler's dump, its state from the kernel."""
    child = child_of(HOLDER, tmp_path)
    assert child.stdout is not None
    deadline = time.monotonic() + 30

    def soon(text: str) -> None:
        while not silence(address, "?").startswith(text):
            assert time.monotonic() < deadline, silence(address, "?")
            time.sleep(0.05)

    try:
        address = json.loads(child.stdout.readline())
        line = f"at {tmp_path}/holder.py:8 (hold)"
        soon(
            "its process is alive but its Python interpreter is blocked (a library holds the "
            f"GIL) {line}"
        )
        os.kill(child.pid, signal.SIGSTOP)
        soon(f"its process is stopped (SIGSTOP?) {line}")
        Process(address | {"began": "1"}).end()  # that number was another process's
        assert child.poll() is None
        Process(address).end()
        assert child.wait(20) == -signal.SIGKILL
        assert silence(address, "otherwise") == "otherwise"
    finally:
        child.kill()
        child.wait()


def test_a_number_that_is_another_files_by_now_is_not_read() -> None:
    """Who reads a pipe's end waits for its writers, or takes what was meant for its reader."""
    (reads, writes), dump = os.pipe(), Dump(threading.get_ident())
    address = dump.address()
    dump.disarm()
    try:
        os.write(writes, b"for the reader")
        os.dup2(writes, address["fd"])
        lines: list[list[str]] = []
        look = threading.Thread(target=lambda: lines.append(Process(address).lines()), daemon=True)
        look.start()
        look.join(20)
        assert lines == [[]] and os.read(reads, 99) == b"for the reader"
    finally:
        for fd in (reads, writes, address["fd"]):
            os.close(fd)


ALARM = """
import ctypes
from training.faults import hang_watch
hang_watch.LATE = 0.0
hang_watch.HangWatch(deadline=0.5).arm(0.2, several=True)
ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.prove
def test_a_process_that_nobody_ends_is_ended_by_the_kernel(tmp_path: Path) -> None:
    assert child_of(ALARM, tmp_path).wait(60) == -signal.SIGALRM


def test_stacks_are_there_when_a_step_that_begins_at_once_after_set_up_hangs() -> None:
    """The others wait --hang-timeout for it then, not set-up's silence."""
    watch = HangWatch(deadline=1000.0, hang_timeout=0.4)
    watch.arm(60.0, several=True)
    try:
        deadline = time.monotonic() + 20
        while not os.fstat(watch.dump.address()["fd"]).st_size:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        watch.disarm()


def test_what_was_armed_is_taken_back_for_good() -> None:
    watch = HangWatch(deadline=1000.0)
    watch.arm(20.0, several=True)
    assert 1000 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1005
    watch.disarm()
    watch.arm(20.0, several=True)  # the monitor's thread, a moment too late
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_single_rank_speaks_once_and_ends_at_its_timeout(capsys: Any) -> None:
    watch, detector = HangWatch(floor=1.2, deadline=2.4), HangDetector(2.4, None)
    for phase in ("data", "step", "data"):
        watch.enter(phase)
    ended = threading.Event()
    hang = in_a_thread(lambda: watch_alone(watch, detector, lambda: "reading", ended, 0.05))
    assert hang is not None and hang.stuck > 2.4
    said = capsys.readouterr().err
    assert said.count("rank 0 hangs in the phase data: in the data loader at") == 1
    assert "stack of the thread MainThread:" in said and "(limit 1 s)" in said
