# SPDX-License-Identifier: Apache-2.0
"""Signals; ranks agree on stopping and on skipped updates a step late, so that no step waits."""

import gc
import os
import signal
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mpu.comm.transport import Axis
from training import checkpoint
from training.run.saver import Saver
from training.run.step import Decision
from training.run.stop import Agreement, StepFlags, StopSignal
from training.run.watch.guard import Guard
from training.run.watch.intervals import GarbageCollection

STEPS = [
    (False, 0.0),
    (True, 0.0),
    (False, 1.0),
    (False, 0.0),
    (True, 1.0),
]  # of rank 1: told to stop, skipped


def answers(comm):
    agreement, found = Agreement(comm.grid().world), []
    for stop, found_inf in STEPS:
        mine = stop and comm.rank == 1
        found.append(agreement.ask(mine, comm.rank == 0 and found_inf > 0, torch.tensor(found_inf)))
    return [*found, agreement.close()]


def test_every_rank_hears_one_step_later_what_one_rank_said(world):
    no, signalled = (False,) * 4, (True, False, False, False)
    skipped = (False, True, True, False)
    heard = [no, no, signalled, skipped, no]
    heard.append((True, True, True, False))  # of the last step, at the end
    assert world(2).run(answers) == [heard, heard]
    assert Agreement(Axis("world")).ask(True, False, torch.tensor(0.0)) == no


USR1, TERM, INT, HUP = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture
def stop(monkeypatch):
    """Signals to this process, which may follow one another sooner than a person's."""
    monkeypatch.setattr(StopSignal, "ECHO", 0.1)
    before = {number: signal.getsignal(number) for number in StopSignal.NUMBERS}
    try:
        with StopSignal() as stop:
            yield stop
    except SystemExit as ended:  # a signal ended the run at once
        assert ended.code == 128 + stop._by
    for number, handler in before.items():
        if stop.received:  # the run is over: one more signal is to change nothing
            assert signal.getsignal(number) == signal.SIG_IGN
        signal.signal(number, handler)


def send(*numbers):
    """Send signals to this process, each long after the one before."""
    for number in numbers:
        time.sleep(0.15)
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [USR1, TERM, INT, HUP])
def test_before_the_first_step_a_signal_ends_the_run_at_once(stop, capfd, number):
    with pytest.raises(KeyboardInterrupt):
        send(number)
        time.sleep(5)
    assert not stop.received
    with pytest.raises(KeyboardInterrupt):  # who took the first one does not train
        stop.begin()
    with pytest.raises(SystemExit) as ended:
        stop.__exit__()
    assert ended.value.code == 128 + number
    assert capfd.readouterr().err == f"\n{signal.Signals(number).name}: stopped at once\n"


@pytest.mark.parametrize(
    "numbers, name",
    [
        ((TERM, TERM, USR1, TERM), "SIGTERM"),  # srun, slurmstepd, torchrun
        ((USR1, TERM, TERM), "SIGUSR1"),
        ((TERM, INT, USR1), "SIGTERM"),  # one Ctrl-C is not two
        ((HUP, TERM), "SIGHUP"),  # the terminal is closed
    ],
)
def test_what_comes_while_a_run_saves_changes_nothing(stop, numbers, name, capfd):
    stop.begin()
    send(*numbers)
    time.sleep(0.15)
    assert stop.received
    said = capfd.readouterr().err
    assert said == f"\n{name}: stopping after this step\n"
    where = SimpleNamespace(save="runs/a", load="runs/a")
    note = stop.end(True, "iteration 12 of 40", where)
    more = "; saved: the same command resumes from there"
    assert note == f"stopped by {name} after iteration 12 of 40{more}"
    assert stop.code == 75


@pytest.mark.parametrize(
    "number, stepped, code",
    [
        (TERM, False, True),
        pytest.param(INT, True, False, marks=pytest.mark.prove),
        pytest.param(INT, False, True, marks=pytest.mark.prove),
        pytest.param(TERM, True, False, marks=pytest.mark.prove),
    ],
)
def test_a_first_step_that_takes_too_long_is_not_waited_for(launcher, number, stepped, code):
    """Nothing is trained before it is done, and a host that swaps may need minutes for it."""
    program = f"""
import os
import time
from training.run.stop import StopSignal
StopSignal.FIRST = 0.1
with StopSignal() as stop:
    stop.begin()
    stop.stepped = {stepped}
    os.kill(os.getpid(), {int(number)})
    end = time.monotonic() + 2.5  # seconds: the guard looks once a second
    while time.monotonic() < end:
        time.sleep(0.1)
    assert stop.received
"""
    done = launcher.python("-c", program)
    assert done.returncode == (128 + number if code else 0), done.stderr
    assert "stopping after this step" in done.stderr
    assert ("the first step took more than 0.1 s: stopped" in done.stderr) == code


@pytest.mark.prove
@pytest.mark.parametrize("number", [TERM, USR1])
def test_who_takes_a_signal_and_stays_is_ended(launcher, number):
    """A model's file may catch everything while it imports, and go on for long."""
    program = f"""
import os
import time
from training.run.stop import StopSignal
StopSignal.LEAVING = 0.1
with StopSignal() as stop:
    try:
        os.kill(os.getpid(), {int(number)})
        time.sleep(9)
    except:
        pass
    time.sleep(9)  # the guard looks once a second
"""
    done = launcher.python("-c", program)
    assert done.returncode == 128 + number, done.stderr
    assert f"{signal.Signals(number).name}: stopped at once\n" in done.stderr


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            stop.begin()
            send(HUP)
            time.sleep(0.1)
            assert not stop.received and signal.getsignal(HUP) == signal.SIG_IGN
        assert signal.getsignal(HUP) == signal.SIG_IGN
    finally:
        signal.signal(HUP, before)


def test_a_second_ctrl_c_ends_the_run_and_its_echo_does_not(stop, capfd):
    stop.begin()
    os.kill(os.getpid(), INT)
    os.kill(os.getpid(), INT)  # what torchrun passes on of the same one
    time.sleep(0.05)
    assert stop.received
    assert capfd.readouterr().err.endswith("this step; a second Ctrl-C stops at once\n")
    with pytest.raises(KeyboardInterrupt):
        send(TERM, INT)
        time.sleep(5)
    assert stop._by == INT


def test_how_a_run_that_ends_early_is_told_and_its_exit_code():
    saved, elsewhere = SimpleNamespace(save="a", load="a"), SimpleNamespace(save="a", load="b")
    stop = StopSignal()
    assert stop.end(False, "iteration 3 of 9", saved) == "stopped after iteration 3 of 9"
    assert stop.code == 0  # --exit-interval: nothing is left to do
    message = stop.end(True, "iteration 3 of 9", elsewhere)
    assert message.startswith(
        "stopped by a signal to another rank after iteration 3 of 9; saved: with"
    )
    assert "--load a the same command" in message and stop.code == 75
    nowhere = SimpleNamespace(save=None, load=None)
    assert stop.end(True, "x", nowhere).endswith("nothing was saved, as there is no --save")
    under_torchrun = StopSignal(os.getppid(), stopped=0)
    under_torchrun.end(True, "x", saved)
    assert under_torchrun.code == 0


def test_the_wait_for_a_step_that_is_judged_at_once_is_in_the_log() -> None:
    """On a GPU, what follows a step waits for it: the host is a step ahead."""
    watch: Any = Guard.__new__(Guard)
    watch.log = SimpleNamespace(interval=SimpleNamespace(seconds=1.0))
    watch.agreement = SimpleNamespace(close=lambda: time.sleep(0.05) or StepFlags())
    watch._before, watch._skipped, watch._rolls_back = None, 0, lambda step, agreed: False
    watch.after_step(SimpleNamespace(agreed=StepFlags(), decided=Decision(save=True)))
    assert watch.log.interval.seconds >= 1.05


def test_garbage_is_collected_before_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    monkeypatch.setattr(gc, "disable", lambda: None)
    watch = GarbageCollection(cast(Any, SimpleNamespace(run=SimpleNamespace(manual_gc_interval=0))))
    for evaluate in (False, True, False):
        step = SimpleNamespace(iteration=3, decided=Decision(evaluate=evaluate))
        watch.after_step(cast(Any, step))
    assert len(collected) == 2  # one as it begins


def test_ranks_wait_for_the_pruning_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher gives the others little time after one has ended."""
    done: list[str] = []
    monkeypatch.setattr(checkpoint, "together", lambda *given: done.append("all"))
    pruning = SimpleNamespace(wait=lambda: done.append("pruned"))
    ctx = SimpleNamespace(grid=SimpleNamespace(world=None), device=None)
    saver: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(save="saved")),
        _wait=lambda: None, _hurry=False, _pruning=pruning, _lock=None, failed=None, ctx=ctx
    )
    Saver.__exit__(saver, None, None, None)
    assert done == ["pruned", "all"]
