# SPDX-License-Identifier: Apache-2.0
"""A rank's end of the one failure channel, which finds who failed first and tells everyone.

A rank killed with -9 says nothing. Its neighbours see a closed connection, leave, and so close
theirs; soon every rank blames another. So each rank holds one TCP connection to a coordinator in
rank 0 that carries nothing but life signs: the kernel closes it the moment a process dies, whatever
killed it. The coordinator decides on ONE first cause and sends it to all. If the coordinator itself
goes, rank 0 is the first cause.

    rank r  -- hello, beats with its action, "failed", goodbye -->  coordinator (a thread of rank 0)
    rank r  <-- beats; the first cause: {rank, action, why} ------  coordinator

An end of file without goodbye is a death and counts at once, and so does an error of the rank's
own. A report that only says that somebody else is gone ("a collective failed") or that a signal
came (launchers send one to the survivors) waits for a better explanation. No beat for `silence`
seconds (a stopped process, a lost machine) is a cause too.
"""

import os
import re
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from mpu.comm.coordinator import DIED, Cause, Connection, Coordinator, at
from mpu.comm.transport import CommunicationError

# source lines and advice in gloo's messages
NOISE = re.compile(r"\[\S+\.\w+:\d+\] |\. This is typically caused by .*")
SIGNAL_WAIT = 0.5  # seconds that a report of a signal waits for the death behind it


class FailureMonitor:
    """This rank's end of the failure channel. `action` is what the rank is doing, in words.

    Use it as a context manager round the whole run. An exception that leaves it is reported. Where
    the exception only says that a peer is gone, the first cause, kept in `first`, is printed. A
    rank that learns of a failure while it is stuck in a collective prints the cause and ends with
    exit code 1 after `unwind` seconds. At world size 1 the monitor only holds `action`.

    grace: seconds that "a collective failed" waits for a better cause. silence: seconds without a
    beat after which a rank counts as lost. beat: seconds between beats; None: 1, or more in a world
    of more than 512 ranks. report: called with the first cause where it is printed.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        store: Any = None,
        host: str = "127.0.0.1",
        *,
        grace: float = 3.0,
        silence: float = 20.0,
        beat: float | None = None,
        unwind: float = 5.0,
        report: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self.rank, self.world, self.action = rank, world, "start-up"
        self.first: Cause | None = None
        self._beat = beat or min(silence / 4, max(1.0, world / 512))
        self._grace, self._silence, self._unwind = grace, silence, unwind
        self._report = report
        self._told, self._failed = threading.Event(), threading.Event()
        self._own, self._left, self._said = "", False, False
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._coordinator: Coordinator | None = None
        if world == 1:
            return
        assert store is not None, "a world of several ranks needs a store to meet at"
        if rank == 0:
            token = secrets.token_hex(16)
            self._coordinator = Coordinator(world, host, token, silence, self._beat)
            self._coordinator.start()
            store.set("weft/monitor", f"{self._coordinator.port} {token}")
        try:
            port, token = store.get("weft/monitor").decode().split()
            self._connection = Connection(socket.create_connection((host, int(port)), timeout=30))
        except (OSError, RuntimeError) as error:
            raise CommunicationError(f"rank 0 is not reached at {host}: {error}") from error
        self._connection.sock.settimeout(self._beat)
        self._connection.send(rank=rank, token=token, action=self.action)
        os.register_at_fork(after_in_child=_Hands(self).off)
        threading.Thread(target=self._listen, name="failure-monitor", daemon=True).start()

    def _listen(self) -> None:
        """Send beats and read the coordinator's, until this rank leaves or somebody failed."""
        connection = self._connection
        assert connection is not None
        turn = sent = heard = time.monotonic()
        while not self._left:
            try:
                messages = connection.read()
                if messages is None:
                    if not self._left:
                        self._stop(Cause(0, "", DIED))
                    return
                heard = time.monotonic()
                for message in messages:
                    if "cause" in message:
                        self._stop(Cause(**message["cause"]))
                        return
            except TimeoutError:
                pass
            now = time.monotonic()
            if now - turn > self._silence / 2:  # this process was stopped, not rank 0
                heard = now
            turn = now
            if now - heard > self._silence:
                self._stop(Cause(0, "", f"no sign of life for {now - heard:.0f} s"))
                return
            if now - sent >= self._beat:
                sent = now
                connection.send(action=self.action)

    def _stop(self, cause: Cause) -> None:
        """Print the cause, give the main thread time to unwind, then end the process."""
        self.first = cause
        self._told.set()
        self._failed.wait(timeout=0.3)  # the main thread may be about to print it
        self._print()
        time.sleep(self._unwind)
        if self._failed.is_set():
            time.sleep(2 * self._unwind)
        self._leave()

    def _print(self) -> None:
        """Print the first cause once, unless it is this rank's own error."""
        with self._lock:  # held while writing: the thread that comes second may end the process
            cause, silent = self.first, self._said
            self._said = True
            if cause is None or silent or cause.why == self._own:
                return
            doing = f" {at(self.action)}" if cause.rank != self.rank else ""
            self._report(str(cause))
            text = f"[rank {self.rank}] stopping{doing}: {cause}\n"
            sys.stderr.write(text)  # one write: ranks that share a terminal do not mix lines
            sys.stderr.flush()

    def _leave(self) -> None:
        os._exit(1)

    def __enter__(self) -> "FailureMonitor":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._connection is None:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._left = True
            self._connection.send(bye=True)
            self._connection.sock.close()
            if self._coordinator is not None:
                self._coordinator.join(timeout=60)  # rank 0 leaves last, so that nobody sees it die
            return
        text = str(error).strip() or "no message"
        text = NOISE.sub("", text.splitlines()[0])
        why, wait = f"{type(error).__name__}: {text}", 0.0
        if isinstance(error, CommunicationError):
            wait = self._grace
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            why, wait = f"ended by a signal (exit code {text})", SIGNAL_WAIT
        if not isinstance(error, CommunicationError):
            self._own = why
        self._failed.set()
        self._connection.send(rank=self.rank, action=self.action, failed=why, wait=wait)
        if self._told.wait(timeout=self._grace + 5):
            self._print()
        if self._coordinator is not None:
            time.sleep(1.0)  # let the others hear the cause before rank 0's coordinator goes


class _Hands:
    """Close the sockets in a forked child: open there, they would hide the rank's death."""

    def __init__(self, monitor: FailureMonitor) -> None:
        self.monitor = weakref.ref(monitor)

    def off(self) -> None:
        monitor = self.monitor()
        if monitor is None:
            return
        if monitor._connection is not None:
            monitor._connection.sock.close()
        if monitor._coordinator is not None:
            for connection in monitor._coordinator.connections:
                connection.sock.close()
            monitor._coordinator.listener.close()
