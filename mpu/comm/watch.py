# SPDX-License-Identifier: Apache-2.0
"""Find who failed first, and tell everyone: the one failure channel.

A rank killed with -9 says nothing. Its neighbours see a closed connection, leave, and so close
theirs; soon every rank blames another. So each rank holds one TCP connection to a hub in rank 0
that carries nothing but life signs: the kernel closes it the moment a process dies, whatever killed
it. The hub decides on ONE first cause and sends it to all. If the hub itself goes, rank 0 is the
first cause.

    rank r  -- hello, beats with its action, "failed", goodbye -->  hub (a thread of rank 0)
    rank r  <-- first cause: {rank, action, why} ------------------  hub

An end of file without goodbye is a death and counts at once. A report that only says "a collective
failed" waits `grace` seconds for a better explanation. No beat for `silence` seconds (a stopped
process) is a cause too.
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from mpu.comm.collectives import CommunicationError


@dataclass(frozen=True)
class Cause:
    """Who failed first, doing what, and why."""

    rank: int
    action: str
    why: str

    def __str__(self) -> str:
        where = f" during {self.action}" if self.action else ""
        return f"rank {self.rank} failed first{where}: {self.why}"


class _Line:
    """A socket that speaks JSON lines."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.buffer = sock, b""
        self.rank, self.action, self.last, self.left = -1, "", time.monotonic(), False

    def send(self, **message: Any) -> None:
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the reading side will see the end of file

    def read(self) -> list[dict[str, Any]] | None:
        """Return the complete messages that arrived, or None at the end of the file."""
        try:
            data = self.sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


class _Hub(threading.Thread):
    """Accept one line a rank, decide on the first cause, tell all."""

    def __init__(self, world: int, grace: float, silence: float) -> None:
        super().__init__(name="watch-hub", daemon=True)
        self.listener = socket.create_server(("", 0), backlog=world)
        self.port: int = self.listener.getsockname()[1]
        self.world, self.grace, self.silence = world, grace, silence
        self.cause: Cause | None = None
        self.weak: tuple[float, Cause] | None = None

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        lines: list[_Line] = []
        joined = 0
        while joined < self.world or lines:
            for key, _ in selector.select(timeout=0.1):
                if key.fileobj is self.listener:
                    lines.append(_Line(self.listener.accept()[0]))
                    selector.register(lines[-1].sock, selectors.EVENT_READ, lines[-1])
                    joined += 1
                    continue
                line: _Line = key.data
                messages = line.read()
                if messages is None:
                    selector.unregister(line.sock)
                    line.sock.close()
                    lines.remove(line)
                    if not line.left and line.rank >= 0:
                        self._decide(Cause(line.rank, line.action, "the process died (killed?)"))
                for message in messages or ():
                    self._hear(line, message)
            self._judge(lines)
            if self.cause is not None:
                for line in lines:
                    line.send(cause=vars(self.cause))
                self.cause = None

    def _hear(self, line: _Line, message: dict[str, Any]) -> None:
        line.last = time.monotonic()
        line.rank = message.get("rank", line.rank)
        line.action = message.get("action", line.action)
        line.left = line.left or "bye" in message
        if "failed" in message:
            line.left = True
            cause = Cause(line.rank, line.action, message["failed"])
            if message["peer"]:
                self.weak = self.weak or (time.monotonic(), cause)
            else:
                self._decide(cause)

    def _judge(self, lines: list[_Line]) -> None:
        now = time.monotonic()
        for line in lines:
            if not line.left and line.rank >= 0 and now - line.last > self.silence:
                line.left = True
                self._decide(
                    Cause(line.rank, line.action, f"no sign of life for {self.silence:.0f} s")
                )
        if self.weak is not None and now - self.weak[0] > self.grace:
            self._decide(self.weak[1])

    def _decide(self, cause: Cause) -> None:
        if getattr(self, "decided", None) is None:
            self.decided = self.cause = cause


class Watch:
    """This rank's end of the failure channel. `action` is what the rank is doing, in words.

    Use as a context manager round the whole run: an exception that leaves it is published, and one
    that only says a peer is gone is replaced by the first cause. A rank told of a failure while it
    is stuck in a collective prints the cause and leaves with exit code 1 after `unwind` seconds. At
    world size 1 it only carries `action`.
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
        beat: float = 1.0,
        unwind: float = 5.0,
    ) -> None:
        self.rank, self.world, self.action = rank, world, "start-up"
        self.first: Cause | None = None
        self._told, self._beat, self._unwind = threading.Event(), beat, unwind
        self._grace, self._said, self._lock = grace, False, threading.Lock()
        self._line: _Line | None = None
        self._hub: _Hub | None = None
        if world == 1:
            return
        assert store is not None, "a world of several ranks needs a store to meet at"
        if rank == 0:
            self._hub = _Hub(world, grace, silence)
            self._hub.start()
            store.set("weft/watch", str(self._hub.port))
        port = int(store.get("weft/watch"))
        self._line = _Line(socket.create_connection((host, port), timeout=30))
        self._line.sock.settimeout(beat)
        self._line.send(rank=rank, action=self.action)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def _listen(self) -> None:
        line = self._line
        assert line is not None
        sent = time.monotonic()
        while not self._said:
            try:
                data = line.sock.recv(65536)
                if not data and not self._said:
                    self._stop(Cause(0, "", "the process died (killed?)"))
                    return
                *lines, line.buffer = (line.buffer + data).split(b"\n")
                for text in lines:
                    self._stop(Cause(**json.loads(text)["cause"]))
                    return
            except TimeoutError:
                pass
            except OSError:
                if not self._said:
                    self._stop(Cause(0, "", "the process died (killed?)"))
                return
            if time.monotonic() - sent >= self._beat:
                sent = time.monotonic()
                line.send(rank=self.rank, action=self.action)

    def _stop(self, cause: Cause) -> None:
        """Tell the person now, give the main thread a moment to unwind, then leave."""
        self.first = cause
        self._told.set()
        if cause.rank != self.rank:
            self._print(cause)
        time.sleep(self._unwind)
        os._exit(1)

    def _print(self, cause: Cause) -> None:
        with self._lock:
            if self._said:
                return
            self._said = True
        print(f"[rank {self.rank}] stopping: {cause}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._line is None:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._said = True
            self._line.send(bye=True)
            self._line.sock.close()
            if self._hub is not None:
                self._hub.join(timeout=60)  # the hub leaves last, so that nobody sees it die
            return
        peer = isinstance(error, CommunicationError)
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self._line.send(
            rank=self.rank, action=self.action, failed=f"{type(error).__name__}: {why}", peer=peer
        )
        if self._told.wait(timeout=self._grace + 5) and self.first is not None:
            self._print(self.first)
        if self._hub is not None:
            time.sleep(1.0)  # let the others hear the cause before rank 0's hub goes
