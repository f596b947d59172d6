# SPDX-License-Identifier: Apache-2.0
"""A rank's end of the failure channel, which finds the rank that failed first and notifies all.

A rank killed with -9 reports nothing. Its neighbours see a closed connection, exit, and so close
theirs; soon every rank blames another. So each rank holds one TCP connection to a coordinator in
rank 0, which carries little but heartbeats: the kernel closes it the moment a process dies,
whatever killed it. The coordinator decides on ONE first cause and sends it to all ranks. If the
coordinator itself dies, rank 0 is the first cause.

    rank r  -- hello, beats with its action, "failed", goodbye -->  coordinator (a thread of rank 0)
    rank r  <-- beats; the first cause: {rank, action, why} ------  coordinator

An end of file without goodbye is a death and counts at once, and so does an error of the rank
itself. A report that only shows that another rank is gone ("a collective failed") or that a signal
arrived (launchers send one to the survivors) waits for a better cause. No beat for `silence`
seconds (a stopped process, a lost machine) is a cause too. A reset connection is not a death while
both processes are alive: the rank reconnects to the coordinator.
"""

import json
import math
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from mpu.comm.transport import CommunicationError
from mpu.launch import Launch
from mpu.worker import to_this_gpu
from training.faults import messages, wire
from training.faults.activity import Activity, say
from training.faults.address import listen_as_known, publish_address
from training.faults.coordinator import DIED, LOST_CONTACT, RETURN, Cause, Coordinator, at
from training.faults.hang_detector import HangDetector, silence, watch_alone
from training.faults.hang_watch import HangWatch
from training.faults.links import Links
from training.faults.messages import Message
from training.faults.process import Process
from training.faults.store import await_key
from training.files.untrusted import printable

# source lines and advice in gloo's messages
NOISE = re.compile(r"\[\S+\.\w+:\d+\] |\. This is typically caused by .*")
QUICK = 1.0  # seconds for the main thread to unwind if no rank can continue
SIGNAL_WAIT = 0.5  # seconds that a report of a signal waits for the death that caused it
LASTING = (ConnectionRefusedError, TimeoutError, wire.Refused)  # retrying does not help
JOIN_TIMEOUT = 60.0  # seconds, at most, until all ranks have joined
JOINING = 5.0  # seconds, at most, for a rank to join once it has the address


def exited_early(error: BaseException | None) -> str:
    """Return a sentence about a sys.exit(0) that ends a run before it is done, else "".

    The system keeps 8 bits of an exit code: 256 is 0. A parser that has printed its help may exit
    in this way.
    """
    if not isinstance(error, SystemExit):
        return ""
    if error.code is not None and not (isinstance(error.code, int) and error.code % 256 == 0):
        return ""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "sys.exit() was called before the run was done"
    if trace.tb_frame.f_globals.get("__name__") == "argparse":
        return ""
    place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"sys.exit() was called at {place} before the run was done"


class FailureMonitor:
    """This rank's end of the failure channel. `action` is the rank's current action, in words.

    Use it as a context manager around the whole run. An exception that leaves it is reported. If
    the exception only shows that a peer is gone, the first cause, stored in `first`, is printed. A
    rank that is notified of a failure while it is stuck in a collective prints the cause and ends
    with exit code 1 after `unwind` seconds. At world size 1 the monitor only watches for a hang.

    store, host: the store where the ranks met, and rank 0's host. secret: shared by all ranks of
    the run and nobody else; b"": only the salt in the store protects the channel. grace: seconds
    that "a collective failed" waits for a better cause. silence: seconds without a beat after which
    a rank counts as lost. beat: seconds between beats; None: 1, or more in a world of more than 512
    ranks, or less where `silence` is short. watch: determines whether this rank hangs. tell: called
    with the first cause when it is printed. activity: this rank's activity; on rank 0 its lines
    also have the places of the other ranks. Raises CommunicationError if rank 0 cannot be reached.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        store: Any = None,
        host: str = "127.0.0.1",
        secret: bytes = b"",
        *,
        grace: float = 3.0,
        silence: float = 20.0,
        beat: float | None = None,
        unwind: float = 5.0,
        watch: HangWatch | None = None,
        tell: Callable[[str], None] = lambda cause: None,
        activity: Activity | None = None,
    ) -> None:
        self.watch, self.activity = watch or HangWatch(), activity or Activity(Launch(rank, world))
        self.rank, self.world = rank, world
        self.first: Cause | None = None
        soon = min(silence, self.watch.hang_timeout or silence)
        self._beat = beat or min(soon / 4, max(1.0, world / 512))
        self._grace, self._silence, self._unwind = grace, silence, unwind
        self._on_failure = tell
        self._notified, self._failed = threading.Event(), threading.Event()
        self._ended = threading.Event()
        self._own, self._left, self._printed = "", False, False
        self._report: dict[str, Any] = {}  # the report of this rank's failure, once it is sent
        self._lock = threading.Lock()
        self._session = secrets.token_hex(8)
        self._to_gpu = to_this_gpu()  # NCCL's flight recorder queries CUDA events
        self._connection: wire.Connection | None = None
        self._coordinator: Coordinator | None = None
        if world == 1:
            return
        assert store is not None, "a world of several ranks needs a store to meet at"
        try:
            if rank == 0:
                self._coordinator = self._coordinate(store, host, secret)
            elif rank == world - 1:
                publish_address(store, host)
            address, port, salt = self._from(store, 0, "monitor").split(",")
            self._address = (address or host, int(port))
            self._secret = wire.secret_of(secret, salt)
            self._connection, received = self._join(JOINING)
        except (OSError, RuntimeError, ValueError) as error:
            text = str(error).splitlines()[0]
            raise CommunicationError(f"rank 0 cannot be reached at {host}: {text}") from error
        if self._coordinator is None:
            self.activity.started()  # from here on rank 0 prints
        else:
            self.activity.others = self._coordinator.elsewhere
        close = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: (of := close()) and of())
        threading.Thread(
            target=self._listen, args=(received,), name="failure-monitor", daemon=True
        ).start()

    def _coordinate(self, store: Any, host: str, secret: bytes) -> Coordinator:
        """Start the coordinator and write its address to the store.

        The secret of this start is derived from the run's secret and `salt`.
        """
        last = self.world - 1
        address, listener = listen_as_known(
            host, self.world, lambda key: self._from(store, last, key)
        )
        salt = secrets.token_hex(16)
        coordinator = Coordinator(
            self.world, listener, wire.secret_of(secret, salt), self._silence, self._beat,
            self._detector(),
        )  # fmt: skip
        coordinator.start()
        store.set("monitor", f"{address},{coordinator.port},{salt}")
        return coordinator

    def _from(self, store: Any, rank: int, key: str) -> str:
        """Return the value that another rank writes to the store for the failure channel."""
        late = TimeoutError(f"rank {rank} connected, but then ended or hung")
        return await_key(
            store, key, time.monotonic() + JOIN_TIMEOUT, lambda: late, activity=self.activity,
            wait="monitor", what=f"rank {rank} to join the failure channel", by=rank,
        )  # fmt: skip

    @property
    def action(self) -> str:
        """The rank's current action, in words."""
        return self.activity.what

    @action.setter
    def action(self, words: str) -> None:
        self.activity.what = words

    def _detector(self) -> HangDetector:
        place = json.dumps(self.watch.dump.address())
        return HangDetector(self.watch.deadline, self.watch.hang_timeout, place)

    def enter(self, phase: str, action: str) -> None:
        """Begin a phase ("data", "step", "evaluation", "save", "load") with an action."""
        first = self.watch.phase == "set-up"
        self.watch.enter(phase)
        self.action = action
        if first and self._connection is not None:  # at once: rank 0's limits get shorter
            received = json.dumps({"phase": phase, "stuck": 0.0})
            messages.send(self._connection, "beat", action=action)
            messages.send(self._connection, "status", said=received)

    def _join(self, seconds: float) -> tuple[wire.Connection, list[Message]]:
        """Connect to the coordinator; retry after temporary errors. Raises OSError."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                connection, received = wire.join(
                    self._address, self._secret, self.rank, self._session, left
                )
                return connection, messages.check(connection, received)
            except OSError as error:
                if isinstance(error, LASTING) or time.monotonic() + 0.1 > deadline:
                    raise
            time.sleep(0.1)

    def _listen(self, received: list[Message]) -> None:
        """Send beats and read the coordinator's, until this rank leaves or any rank fails."""
        self._to_gpu()
        looked = sent = last_report = time.monotonic()
        place0, doing = "{}", ""  # where rank 0's process is, and its last action
        links = Links(self._silence)
        assert self._connection is not None
        messages.send(self._connection, "place", said=json.dumps(self.watch.dump.address()))
        self.watch.arm(self.watch.patience(self._silence), several=True)  # before the first beat
        while not self._left:
            connection = self._connection
            for kind, fields in received:
                if kind == "cause":
                    self._stop(Cause(**fields))
                    return
                if kind == "alive":
                    doing = fields["action"]
                elif kind == "place":
                    place0 = fields["said"]
                elif kind == "report":
                    messages.send(
                        connection, "stack", text=self.watch.report(self.rank, fields["text"])
                    )
            if connection.ended:
                why, received = ("", []) if self._left else self._come_back()
                if why:
                    self._stop(Cause(0, "", why))
                    return
                last_report = time.monotonic()
                continue
            if connection.wait(self._beat):
                received, last_report = messages.receive(connection), time.monotonic()
            else:
                received = []
            now = time.monotonic()
            patience = self.watch.patience(self._silence)
            if now - looked > patience / 2:  # this process was stopped, not rank 0
                last_report = now
            looked = now
            if now - last_report > patience:
                lost = f"rank 0 and rank {self.rank} lost contact {LOST_CONTACT}"
                lost = silence(json.loads(place0), lost)
                why = f"no heartbeat for {now - last_report:.0f} s: {lost}; its last report, before"
                self._stop(Cause(0, "", f"{why}: {doing}", 1, place0))
                return
            if now - sent >= self._beat and connection.flush():
                sent = now
                self.watch.arm(patience, several=True)
                messages.send(connection, "beat", action=self.action)
                status = self.watch.status(self.action, self._beat)
                messages.send(connection, "status", said=json.dumps(status))
            for address, seconds in links.dead():
                messages.send(connection, "unheard", address=address, seconds=seconds)

    def _alone(self) -> None:
        """Watch a world of one rank until it leaves or hangs for too long."""
        self._to_gpu()
        hang = watch_alone(
            self.watch, self._detector(), lambda: self.action, self._ended, self._beat
        )
        if hang is not None:
            self._stop(Cause(0, self.action, hang.text, quick=1))

    def _come_back(self) -> tuple[str, list[Message]]:
        """Reconnect to the coordinator; return why that failed, or "", and its first messages.

        If rank 0's process is dead, nothing listens any more, and the connection fails at once.
        """
        try:
            self._connection, received = self._join(RETURN)
        except ConnectionRefusedError:
            return DIED, []
        except OSError as error:
            lost = f"rank 0 and rank {self.rank} lost contact {LOST_CONTACT}"
            return f"the connection was reset and cannot be restored ({error}): {lost}", []
        if self._report:
            messages.send(self._connection, "failed", **self._report)
        return "", received

    def _stop(self, cause: Cause) -> None:
        """Print the cause, give the main thread time to unwind, then end the process."""
        self.first = cause
        self._notified.set()
        self._failed.wait(timeout=0.3)  # the main thread may be about to print it
        if cause.quick and cause.rank == self.rank:
            say(self.watch.stacks())
        self._print()
        if cause.address:
            Process(json.loads(cause.address)).end()
        time.sleep(min(self._unwind, QUICK) if cause.quick else self._unwind)
        if self._failed.is_set():
            time.sleep(2 * self._unwind)
        self._leave()

    def _print(self) -> None:
        """Print the first cause once, unless it is this rank's own error."""
        with self._lock:  # held while writing: the second thread may end the process
            cause, silent = self.first, self._printed
            self._printed = True
            if cause is None or silent or cause.why == self._own:
                return
            doing = f" {at(self.action)}" if cause.rank != self.rank else ""
            self._on_failure(str(cause))
            self.activity.started()  # print no more lines on waits
            say(f"[rank {self.rank}] stopping{doing}: {cause}")

    def _leave(self) -> None:
        os._exit(1)

    def __enter__(self) -> "FailureMonitor":
        if self.world == 1 and self.watch.deadline < math.inf:
            threading.Thread(target=self._alone, name="failure-monitor", daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._ended.set()
        self.watch.disarm()
        early = exited_early(error)
        if error is None or self._connection is None:
            if early:
                raise RuntimeError(early) from error
            self._say_bye()
            return
        text = str(error).strip() or "no message"
        text = NOISE.sub("", text.splitlines()[0])
        why, wait = f"{type(error).__name__}: {text}", 0.0
        if early:
            why = early
        elif isinstance(error, CommunicationError):
            wait = self._grace
        elif isinstance(error, SystemExit) and isinstance(error.code, str):
            why = text
        elif isinstance(error, KeyboardInterrupt) and not error.args:
            why, wait = "stopped by Ctrl-C", SIGNAL_WAIT
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            why, wait = f"ended by a signal (exit code {text})", SIGNAL_WAIT
        why = printable(why, most=wire.PRINTED)
        if not isinstance(error, CommunicationError):
            self._own = why
        self._failed.set()
        self._report = {"action": self.action, "why": why, "wait": wait}
        messages.send(self._connection, "failed", **self._report)
        if self._notified.wait(timeout=self._grace + 5):
            self._print()
        if self._coordinator is not None:  # it ends with rank 0: send the cause first
            deadline = time.monotonic() + 1.0
            while self._coordinator.has_others() and time.monotonic() < deadline:
                time.sleep(0.01)
        if early:
            raise RuntimeError(why) from error

    def _say_bye(self) -> None:
        """Leave without failure; rank 0 leaves last, so that no rank reports its end."""
        self._left = True
        if self._connection is None:
            return
        messages.send(self._connection, "bye")
        deadline = time.monotonic() + 1.0
        while not self._connection.flush() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._connection.close()
        if self._coordinator is not None:
            self._coordinator.join(timeout=60)

    def _close(self) -> None:
        """Close the sockets in a forked child: left open, they would hide the rank's death."""
        if self._connection is not None:
            self._connection.close()
        if self._coordinator is not None:
            self._coordinator.close()
