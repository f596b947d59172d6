# SPDX-License-Identifier: Apache-2.0
"""The FailureMonitor by itself: which cause wins, which ranks hear it, and how it ends."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from mpu.comm.transport import CommunicationError
from mpu.comm.waits import Wait
from training.faults.coordinator import Cause
from training.faults.monitor import FailureMonitor

PATIENCE = 20.0  # seconds, for what takes milliseconds


class Staying(FailureMonitor):
    """A monitor whose rank only notes that it would leave: it is a thread of this process."""

    gone = False

    def _leave(self) -> None:
        self.gone = True


class Ranks:
    """Several ranks' ends of one channel, in this process."""

    def __init__(self, world: int, **settings: Any) -> None:
        self.store = dist.HashStore()
        options = {"grace": 0.3, "beat": 0.05, "unwind": 0.1} | settings
        first = Staying(0, world, self.store, **options)
        others = [Staying(rank, world, self.store, **options) for rank in range(1, world)]
        self.monitors = [first, *others]
        wait_until(lambda: len(first._coordinator.members) == world)

    def fail(self, rank: int, error: BaseException, action: str = "work") -> threading.Thread:
        """Let an exception leave the monitor of `rank`."""
        self.monitors[rank].action = action
        thread = threading.Thread(
            target=self.monitors[rank].__exit__, args=(type(error), error, None), daemon=True
        )
        thread.start()
        return thread

    def die(self, rank: int) -> None:
        """Close the connection of `rank` as the kernel does for a killed process."""
        self.monitors[rank]._left = True  # its threads are gone, too
        self.monitors[rank]._connection.sock.shutdown(socket.SHUT_RDWR)

    def gone(self) -> list[int]:
        """List the ranks that would have left by themselves."""
        return [monitor.rank for monitor in self.monitors if monitor.gone]

    def bye(self) -> None:
        """Let all leave in peace."""
        for monitor in reversed(self.monitors):
            monitor.__exit__(None, None, None)

    def causes(self, but: int = -1) -> set[Cause | None]:
        """Return what every rank (but one) was told, once they have been."""
        others = [w for w in self.monitors if w.rank != but]
        wait_until(lambda: all(w.first is not None for w in others))
        return {w.first for w in others}


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for something that comes soon."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    """ranks(n) -> n monitors that know each other."""
    made: list[Ranks] = []

    def make(world: int, **settings: Any) -> Ranks:
        made.append(Ranks(world, **settings))
        return made[-1]

    yield make
    for each in made:
        for monitor in each.monitors:
            monitor._left = monitor._printed = (
                True  # threads that still wait have nothing more to say
            )
            monitor._connection.sock.close()


def test_a_death_is_told_to_all_at_once(ranks: Callable[..., Ranks], capsys: Any) -> None:
    three = ranks(3)
    three.monitors[2].action = "the update of iteration 7"
    wait_until(
        lambda: any("7" in m.action for m in three.monitors[0]._coordinator.members.values())
    )
    three.die(2)
    (cause,) = three.causes(but=2)
    assert cause.rank == 2 and "the process died" in cause.why
    assert "s before: the update of iteration 7" in cause.why
    wait_until(lambda: three.gone() == [0, 1])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("rank 2 failed first: the process died" in x for x in lines)


def test_a_failed_collective_waits_for_the_better_cause(ranks: Callable[..., Ranks]) -> None:
    """Ranks 0 and 1 see a closed connection before rank 2's own error is published."""
    three = ranks(3, grace=5.0)
    three.fail(0, CommunicationError("all_reduce over dp: Connection closed by peer"))
    three.fail(1, CommunicationError("all_reduce over dp: Connection closed by peer"))
    time.sleep(0.2)
    three.fail(2, KeyError("weight"), "backward of micro-batch 0, iteration 3")
    assert three.causes() == {
        Cause(2, "backward of micro-batch 0, iteration 3", "KeyError: 'weight'")
    }


def test_a_failed_collective_counts_when_nothing_better_comes(
    ranks: Callable[..., Ranks],
) -> None:
    two = ranks(2, grace=0.2)
    two.fail(1, CommunicationError("all_reduce over tp: no route to host\nand a stack"), "start-up")
    assert two.causes() == {
        Cause(1, "start-up", "CommunicationError: all_reduce over tp: no route to host")
    }


def test_a_rank_that_hangs_is_named_before_those_that_gave_up_waiting(
    ranks: Callable[..., Ranks], capsys: Any
) -> None:
    """It still beats; those that wait for it are the ones to fail."""
    four = ranks(4, grace=0.5)
    detector = four.monitors[0]._coordinator.detector
    for rank, monitor in enumerate(four.monitors):
        wait = Wait("all_reduce", "tp", (0, 1, 2, 3), 5 if rank != 2 else 4)
        said = {"phase": "step", "stuck": 60.0, "started": {"tp": wait.number}, "kind": "compute"}
        monitor.watch.status = lambda action, beat, said=said, wait=wait: (
            said | {"wait": None if wait.number == 4 else wait.pack()}
        )
        monitor.action = f"the work of rank {rank}"
    wait_until(
        lambda: len(detector._fields) == 4 and all("kind" in x for x in detector._fields.values())
    )
    error = CommunicationError("all_reduce over tp: Timed out waiting 600000ms")
    four.fail(0, error, "waiting for rank 2")
    (cause,) = four.causes()
    assert cause.rank == 2 and cause.action == "the work of rank 2"
    assert cause.why.startswith("rank 2 hangs in the phase step: computing, for 6")
    assert "; ranks 1 and 3 wait in all_reduce 5 over tp; rank 0 gave up: Comm" in cause.why
    wait_until(lambda: four.gone() == [0, 1, 2, 3])
    said = capsys.readouterr().err
    assert said.count("rank 2 failed first during the work of rank 2: rank 2 hangs") == 4


def test_a_timeout_without_a_hang_says_who_was_somewhere_else(
    ranks: Callable[..., Ranks],
) -> None:
    two = ranks(2, grace=0.3)
    two.monitors[1].action = "saving iteration 6"
    wait_until(lambda: two.monitors[0]._coordinator.members[1].action == "saving iteration 6")
    error = CommunicationError("all_reduce over tp: Timed out waiting 600000ms")
    two.fail(0, error, "the update of iteration 7")
    (cause,) = two.causes()
    assert cause.why.endswith("600000ms; meanwhile rank 1 was at: saving iteration 6")


def test_a_death_explains_the_signal_that_it_brought(ranks: Callable[..., Ranks]) -> None:
    """torchrun ends the survivors by SIGTERM, which may be heard of before the death."""
    three = ranks(3)
    three.fail(1, SystemExit(143))
    three.die(2)
    (cause,) = three.causes(but=2)
    assert cause.rank == 2


def test_a_signal_alone_is_the_cause_and_said_once(
    ranks: Callable[..., Ranks], capsys: Any
) -> None:
    three = ranks(3)
    for rank in range(3):
        three.fail(rank, SystemExit(130))
    (cause,) = three.causes()
    assert cause.why == "ended by a signal (exit code 130)"
    wait_until(lambda: three.gone() == [0, 1, 2])
    assert capsys.readouterr().err == ""  # each knows of its own


def test_what_all_ranks_raise_together_is_not_blamed_on_one(
    ranks: Callable[..., Ranks], capsys: Any
) -> None:
    three = ranks(3)
    for thread in [three.fail(rank, ValueError("--load x: of another model")) for rank in range(3)]:
        thread.join(PATIENCE)
    assert capsys.readouterr().err == ""


def test_an_exit_in_the_middle_is_no_goodbye(ranks: Callable[..., Ranks]) -> None:
    three = ranks(3)
    three.monitors[1]._notified.set()
    with pytest.raises(RuntimeError, match="sys.exit"):
        three.monitors[1].__exit__(SystemExit, SystemExit(0), None)
    assert {c.why for c in three.causes()} == {"sys.exit() was called before the run was done"}
    with pytest.raises(RuntimeError, match="sys.exit"), FailureMonitor():
        raise SystemExit


def test_only_the_first_cause_counts(ranks: Callable[..., Ranks]) -> None:
    three = ranks(3)
    three.fail(1, RuntimeError("first"))
    assert {c.why for c in three.causes()} == {"RuntimeError: first"}
    three.fail(2, RuntimeError("second"))
    time.sleep(0.2)
    assert {c.why for c in three.causes()} == {"RuntimeError: first"}


def test_the_end_of_rank_0_is_seen_without_a_coordinator(ranks: Callable[..., Ranks]) -> None:
    three = ranks(3)
    three.monitors[0]._coordinator.close()  # it goes with its process
    assert {c.rank for c in three.causes()} == {0}


def test_silence_is_a_cause(ranks: Callable[..., Ranks]) -> None:
    two = ranks(2, silence=1.0, beat=0.1)
    line = two.monitors[1]._connection
    line.send = lambda message: None  # stopped: the connection stands, nothing comes
    (cause,) = two.causes()
    assert cause.rank == 1 and "no heartbeat" in cause.why


@pytest.mark.prove
def test_a_rank_that_falls_silent_right_after_set_up_counts_as_lost_soon(
    ranks: Callable[..., Ranks],
) -> None:
    """It says that set-up is over before its next beat; --hang-timeout holds from then on."""
    two = ranks(2, silence=60.0, beat=0.1)
    detector = two.monitors[0]._coordinator.detector
    detector.hang_timeout = 1.0
    assert detector.patience(1, 60.0) == 60.0
    line, two.monitors[1]._beat = two.monitors[1]._connection, 9.0  # no beat comes soon
    two.monitors[1].enter("data", "reading the data of iteration 1")
    assert line is not None
    line.send = lambda message: None
    (cause,) = two.causes()
    assert cause.rank == 1 and "no heartbeat" in cause.why
    assert cause.why.endswith("before: reading the data of iteration 1")


@pytest.mark.prove
def test_a_silent_coordinator_is_rank_0s_fault(ranks: Callable[..., Ranks]) -> None:
    two = ranks(2, silence=1.0, beat=0.1)
    coordinator = two.monitors[0]._coordinator
    coordinator.beat = 1e9  # the coordinator's thread stands still
    wait_until(lambda: two.monitors[1].first is not None)
    assert two.monitors[1].first.rank == 0 and "no heartbeat" in two.monitors[1].first.why


def test_a_goodbye_is_no_death_and_costs_no_time(ranks: Callable[..., Ranks], capsys: Any) -> None:
    three = ranks(3)
    began = time.monotonic()
    three.bye()
    assert time.monotonic() - began < 50  # the coordinator's patience at the end is 60
    assert not three.monitors[0]._coordinator.is_alive()
    assert three.gone() == [] and capsys.readouterr().err == ""
    assert all(monitor.first is None for monitor in three.monitors)


def test_one_that_joins_late_is_told(ranks: Callable[..., Ranks]) -> None:
    two = ranks(2)
    two.monitors[0]._coordinator.world = 3
    two.fail(1, RuntimeError("early"))
    assert {c.why for c in two.causes()} == {"RuntimeError: early"}
    late = Staying(2, 3, two.store, beat=0.05, unwind=0.1)
    wait_until(lambda: late.gone)  # it has said why by then
    assert late.first is not None and late.first.rank == 1


def test_the_port_of_a_local_run_is_not_open_to_the_network(ranks: Callable[..., Ranks]) -> None:
    assert ranks(2).monitors[0]._coordinator.listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.prove
def test_a_forked_child_does_not_hide_a_death(ranks: Callable[..., Ranks]) -> None:
    two = ranks(2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # outlive the rank
        listener = two.monitors[0]._coordinator.listener
        os._exit(0 if listener.fileno() < 0 else 1)
    try:
        two.monitors[1]._left = True
        two.monitors[
            1
        ]._connection.sock.close()  # as the kernel does: this process's hold, not the child's
        wait_until(lambda: two.monitors[0]._coordinator.decided is not None)
        assert two.monitors[0]._coordinator.decided.rank == 1
    finally:
        os.close(write)
        _, status = os.waitpid(child, 0)
    assert status == 0, "the child would keep rank 0's port, where nobody answers"


def test_a_world_of_one_needs_nothing() -> None:
    with pytest.raises(KeyError), FailureMonitor() as monitor:
        monitor.action = "anything"
        raise KeyError("its own")


def test_an_unreachable_coordinator_is_a_failed_communication(free_port: Callable[[], int]) -> None:
    store = dist.HashStore()
    store.set("monitor", f"127.0.0.1,{free_port()},00")
    with pytest.raises(CommunicationError, match="rank 0 cannot be reached at 127.0.0.1"):
        FailureMonitor(1, 2, store)
