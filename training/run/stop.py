# SPDX-License-Identifier: Apache-2.0
"""Stop a run on signals and time limits, in agreement with all ranks."""

import math
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from mpu.comm.collectives import all_reduce
from mpu.comm.transport import Axis, Label
from mpu.host_memory import read_values
from training.settings.arguments import CheckpointConfig, RunConfig

AT_ONCE = "stopped at once"


class StopSignal:
    """Turn SIGTERM, SIGUSR1, Ctrl-C and a hangup of the terminal into an orderly end of the run.

    It is active as a context manager. A hangup (SIGHUP) counts unless the run was started by nohup.

    Before begin(), a signal ends the run at once. It raises KeyboardInterrupt in the main thread,
    which no code takes for an error of its own; the end of the context then prints a line and
    raises SystemExit with the shell's exit code for that signal, 128 + its number. This holds even
    if the interrupted code catches the exception (it may be the imports of a model's file), and
    training does not begin: a guard thread ends a process that is still there LEAVING seconds
    later. While training, the first signal sets `received`, and the run saves and ends after the
    current step. Later signals have no effect: srun, slurmstepd and torchrun each send one, and
    none may interrupt a save. The exception is a Ctrl-C more than ECHO seconds after the first,
    which ends the run at once. (Within ECHO it is the same key press: the terminal signals every
    process, and torchrun forwards its own.) If the main thread is blocked in a wait and cannot
    raise, the guard ends the process after PATIENCE seconds.
    The first step may take minutes, for instance on a host that swaps, and there is nothing to save
    before it is done (`stepped`): until then, the guard ends the run FIRST seconds after a signal.

    launcher: the process id of a parent whose death counts as a SIGTERM, so that no rank outlives
    a torchrun or a slurmstepd that was killed. stopped: the exit code of a run that a signal
    stopped early. code: the exit code of this run. verbose: whether this rank prints a line about a
    signal; the caller sets it once it knows the rank.
    """

    ECHO, PATIENCE, FIRST, LEAVING = 1.0, 3.0, 10.0, 12.0
    NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

    def __init__(self, launcher: int | None = None, stopped: int = os.EX_TEMPFAIL) -> None:
        self.received = self.training = self.stepped = False
        self.verbose = True
        self.code, self._stopped = 0, stopped
        self._name = "a signal to another rank"
        self._launcher = launcher
        self._first: float | None = None  # time of the first Ctrl-C, or of the immediate end
        self._ending, self._by = threading.Event(), 0  # an immediate end, and its signal

    def __enter__(self) -> "StopSignal":
        self._sockets = socket.socketpair()
        self._sockets[0].setblocking(False)
        # the interpreter writes a signal's number here at once, whatever the main thread is doing
        self._wakeup = signal.set_wakeup_fd(self._sockets[0].fileno(), warn_on_full_buffer=False)
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [n for n in self.NUMBERS if n != signal.SIGHUP or not ignored]
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        threading.Thread(target=self._guard, name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # a repeated signal must not change the exit code of a run that the first one ended
            signal.signal(number, signal.SIG_IGN if self.received else handler)
        signal.set_wakeup_fd(self._wakeup)
        self._sockets[0].close()
        if self._ending.is_set():
            self._say(self._by, AT_ONCE)
            raise SystemExit(128 + self._by) from None

    def check(self) -> None:
        """Raise KeyboardInterrupt again if a signal ended the run and an `except:` swallowed it, so
        that errors which follow from that are not reported as mistakes.
        """
        if self._ending.is_set():
            raise KeyboardInterrupt(128 + self._by)

    def begin(self) -> None:
        """Begin training: signals now take effect after the current step. The caller sets `stepped`
        when the first step is done.
        """
        self.check()
        self.training = True

    def end(self, by_signal: bool, done: str, saved: CheckpointConfig, stage: str = "") -> str:
        """Set the exit code of a run that ends early, and return the line to print about it.

        by_signal: whether a signal ends it. done: the progress of the run, in words. stage: the
        next stage, which another process must begin.
        """
        if not by_signal and not stage:
            return f"stopped after {done}"
        self.code = self._stopped
        if not by_signal:
            return f"stopped after {done}, as stage {stage} is next: the same command continues"
        if not saved.save:
            rest = "nothing was saved, as there is no --save"
        elif saved.load == saved.save:
            rest = "saved: the same command resumes from there"
        else:
            rest = f"saved: with --load {saved.save} the same command resumes from there"
        return f"stopped by {self._name} after {done}; {rest}"

    def _at_once(self, number: int, first: float | None) -> bool:
        """Return whether a signal ends the run now. first: the time of the first Ctrl-C."""
        return not self.training or (
            number == signal.SIGINT and first is not None and time.monotonic() - first > self.ECHO
        )

    def _handle(self, number: int, frame: Any) -> None:
        now, first = time.monotonic(), self._first
        if self._ending.is_set():
            if first is not None and now - first > self.ECHO:
                self._leave(number)  # a second signal while the process exits
            return
        if self._at_once(number, first):
            self._first, self._by = now, number
            self._ending.set()
            raise KeyboardInterrupt(128 + number)
        if number == signal.SIGINT:
            self._first = first or now
        if not self.received:
            self.received, self._name = True, signal.Signals(number).name
            more = "; a second Ctrl-C stops at once" if number == signal.SIGINT else ""
            self._say(number, f"stopping after this step{more}")

    def _say(self, number: int, text: str) -> None:
        """Print a line if `verbose`, without print(), which the signal may have interrupted."""
        if self.verbose:
            with suppress(OSError):  # a full disk, or a terminal that is gone
                os.write(2, f"\n{signal.Signals(number).name}: {text}\n".encode())

    def _leave(self, number: int, why: str = AT_ONCE) -> NoReturn:
        self._say(number, why)
        os._exit(128 + number)

    def _guard(self) -> None:
        first: float | None = None
        end_at, last = math.inf, 0
        with self._sockets[1] as end:
            end.settimeout(1.0)
            while True:
                try:
                    number = end.recv(1)
                except TimeoutError:
                    began = self._first if self._ending.is_set() else None
                    if began is not None and time.monotonic() > began + self.LEAVING:
                        self._leave(self._by)
                    if not self.stepped and time.monotonic() > end_at:
                        long = f"the first step took more than {self.FIRST:g} s: stopped"
                        self._leave(last, long)
                    if self._launcher not in (None, os.getppid()):
                        self._launcher = None
                        os.kill(os.getpid(), signal.SIGTERM)
                    continue
                if not number:
                    return
                if number[0] in self.NUMBERS:
                    if self.training and not self.stepped:
                        end_at, last = min(end_at, time.monotonic() + self.FIRST), number[0]
                    if self._at_once(number[0], first) and not self._ending.wait(self.PATIENCE):
                        self._leave(number[0])
                    if number[0] == signal.SIGINT:
                        first = first or time.monotonic()


class StepFlags(NamedTuple):
    """The flags that at least one rank reported for a step; the same on every rank."""

    signal: bool = False  # a signal asks to stop
    over: bool = False  # time is up, or a save failed and --on-save-failure is stop
    skipped: bool = False  # the update was skipped: the gradient norm was not finite
    spiked: bool = False  # loss or gradient norm is far above those before (--on-spike)

    def __or__(self, other: tuple[bool, ...]) -> "StepFlags":
        """Return the flags that are set in either of the two."""
        return StepFlags(*(a or b for a, b in zip(self, other, strict=True)))


class Agreement:
    """Combine the flags of all ranks, one step late, so that no step waits for the result."""

    def __init__(self, world: Axis) -> None:
        self.world = world
        self._pending: _Flags | None = None
        self._stream: torch.cuda.Stream | None = None

    def ask(self, signal: bool, over: bool, found_inf: Tensor, *more: Tensor) -> StepFlags:
        """Send this rank's flags of this step; return the flags of all ranks for the step before.

        found_inf: 1 if the update was skipped. more: the further fields of StepFlags, if any.
        """
        device = found_inf.device
        if self._stream is None and device.type == "cuda" and not self.world.staged:
            self._stream = torch.cuda.Stream(device)
        last = self._pending
        mine = [found_inf.new_full((), float(flag)) for flag in (signal, over)]
        flags = torch.stack([*mine, found_inf, *(flag.to(found_inf) for flag in more)])
        self._pending = _Flags(flags, self.world, self._stream)
        return last.read() if last else StepFlags()

    def wait(self) -> None:
        """Wait for the flags of all ranks for the last step; `ask` or `close` returns them."""
        if self._pending:
            self._pending.wait()

    def close(self) -> StepFlags:
        """Wait for the flags of all ranks for the last step, and return them once.

        Call it before a save, which must not contain a skipped step, and before the process groups
        are destroyed.
        """
        last, self._pending = self._pending, None
        return last.read() if last else StepFlags()


class _Flags:
    """One step's flags, summed over all ranks and copied to the host asynchronously.

    On CUDA the copy has a stream of its own: neither the device nor the host waits for it before
    read(), which waits only for work that was queued before ask().
    """

    def __init__(self, flags: Tensor, world: Axis, stream: torch.cuda.Stream | None) -> None:
        label = Label("agreement", "go on?")
        self._sum, self._handle = all_reduce(flags, world, async_op=True, label=label)
        self._host, self._arrived = self._sum, None
        if stream is not None:
            self._host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            stream.wait_stream(torch.cuda.current_stream(flags.device))
            with torch.cuda.stream(stream):
                self._handle.wait()  # orders the stream
                self._host.copy_(self._sum, non_blocking=True)
                self._arrived = stream.record_event()

    def wait(self) -> None:
        if self._arrived is None:
            self._handle.wait()
        else:
            self._arrived.synchronize()

    def read(self) -> StepFlags:
        if self._arrived is None:
            self._handle.wait()
        return StepFlags(*(flag > 0 for flag in read_values(self._host, self._arrived)))


def time_is_up(settings: RunConfig, started: float) -> bool:
    """Return whether --exit-duration-in-mins have passed since `started`, a time.monotonic()."""
    minutes = settings.exit_duration_in_mins or 0  # 0: no limit
    return 0 < 60 * minutes < time.monotonic() - started
