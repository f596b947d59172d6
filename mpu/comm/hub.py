# SPDX-License-Identifier: Apache-2.0
"""Decide who failed first: the hub of the failure channel (mpu/comm/watch.py), a thread of rank 0.

It accepts one line a rank, hears life signs and reports, and sends all ranks ONE first cause. It
knows no process group, so it goes on when they break.
"""

import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

DIED = "the process died (killed?)"
LINE_LIMIT = 1 << 16  # bytes without a newline: not one of ours


def at(action: str) -> str:
    """Write an action into a sentence: "during the update", "while waiting for F ..."."""
    return f"{'while' if action.split(' ')[0].endswith('ing') else 'during'} {action}"


@dataclass(frozen=True)
class Cause:
    """Who failed first, doing what, and why."""

    rank: int
    action: str
    why: str

    def __str__(self) -> str:
        where = f" {at(self.action)}" if self.action else ""
        return f"rank {self.rank} failed first{where}: {self.why}"


def _named(ranks: list[int]) -> str:
    """Write "rank 3 was" or "ranks 0, 1, 2 and 5 more were"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} was"
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"ranks {', '.join(map(str, ranks[:3]))}{more} were"


class Line:
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
        """Return the complete messages that arrived, or None at the end of the file (or of sense).

        Raises TimeoutError where the socket has a timeout and nothing came.
        """
        try:
            data = self.sock.recv(65536)
        except TimeoutError:
            raise
        except OSError:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        sound = all(isinstance(m, dict) for m in messages) and len(self.buffer) < LINE_LIMIT
        return messages if data and sound else None


class Hub(threading.Thread):
    """Accept one line a rank, decide on the first cause, tell all. `token` keeps strangers out."""

    def __init__(self, world: int, host: str, token: str, silence: float, beat: float) -> None:
        super().__init__(name="watch-hub", daemon=True)
        here = host in ("localhost", "127.0.0.1")
        self.listener = socket.create_server((host if here else "", 0), backlog=world)
        self.port: int = self.listener.getsockname()[1]
        self.world, self.token, self.silence, self.beat = world, token, silence, beat
        self.lines: list[Line] = []
        self.joined: set[int] = set()
        self.decided: Cause | None = None
        self.weak: list[tuple[float, Cause]] = []  # (when it counts, cause)

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        turn = sent = time.monotonic()
        while len(self.joined) < self.world or any(line.rank >= 0 for line in self.lines):
            for key, _ in selector.select(timeout=0.1):
                if key.fileobj is self.listener:
                    self.lines.append(Line(self.listener.accept()[0]))
                    selector.register(self.lines[-1].sock, selectors.EVENT_READ, self.lines[-1])
                    continue
                line: Line = key.data
                messages = line.read()
                for message in messages or ():
                    self._hear(line, message)
                if messages is None:
                    selector.unregister(line.sock)
                    line.sock.close()
                    self.lines.remove(line)
                    if not line.left and line.rank >= 0:
                        self._decide(self._silenced(line, DIED))
            now = time.monotonic()
            if now - turn > self.silence / 2:  # it is we who were stopped: nobody else was silent
                for line in self.lines:
                    line.last = now
            turn = now
            self._judge(now)
            if now - sent > self.beat:
                sent = now
                for line in self.lines:
                    line.send(beat=True)
        self.listener.close()

    def _hear(self, line: Line, message: dict[str, Any]) -> None:
        line.last = time.monotonic()
        if line.rank < 0:
            rank = message.get("rank")
            if message.get("token") != self.token or type(rank) is not int:
                return
            line.rank = rank
            self.joined.add(rank)
            if self.decided is not None:
                line.send(cause=vars(self.decided))
        line.action = message.get("action", line.action)
        line.left = line.left or "bye" in message or "failed" in message
        if "failed" in message:
            cause = Cause(line.rank, line.action, message["failed"])
            if message["wait"]:
                self.weak.append((line.last + message["wait"], cause))
            else:
                self._decide(cause)

    def _silenced(self, line: Line, why: str) -> Cause:
        """Say what is known of a rank that did not speak for itself."""
        age = time.monotonic() - line.last
        return Cause(line.rank, "", f"{why}; its last word, {age:.1f} s before: {line.action}")

    def _judge(self, now: float) -> None:
        for line in self.lines:
            if not line.left and line.rank >= 0 and now - line.last > self.silence:
                line.left = True
                self._decide(self._silenced(line, "no sign of life"))
        for due, cause in self.weak:
            if now > due:
                self._decide(self._with_straggler(cause))

    def _with_straggler(self, cause: Cause) -> Cause:
        """Add to "a collective failed" who was somewhere else, and to "timed out" who has not.

        One who waits for a message does so because of another: that other is looked for.
        """
        others = [x for x in self.lines if not x.left and x.rank >= 0]
        if not any(words in cause.why.lower() for words in ("timed out", "timeout")):
            others = [x for x in others if x.action != cause.action]
        late = [x for x in others if not x.action.startswith("waiting for ")] or others
        places: dict[str, list[int]] = {}
        for line in sorted(late, key=lambda x: x.rank):
            places.setdefault(line.action, []).append(line.rank)
        told = [f"{_named(ranks)} at: {action}" for action, ranks in places.items()]
        why = "; meanwhile ".join([cause.why, *told[:1]]) + "".join(f", {x}" for x in told[1:3])
        return Cause(cause.rank, cause.action, why)

    def _decide(self, cause: Cause) -> None:
        if self.decided is None:
            self.decided = cause
            for line in self.lines:
                line.send(cause=vars(cause))
