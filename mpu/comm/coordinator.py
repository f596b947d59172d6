# SPDX-License-Identifier: Apache-2.0
"""Decide who failed first: the coordinator of the failure channel, a thread of rank 0.

It accepts one connection per rank, receives beats and reports, and sends all ranks ONE first cause.
It uses no process group, so it goes on when they break. Its peers: mpu/comm/failure_monitor.py.
"""

import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

DIED = "the process died (killed?)"
LINE_LIMIT = 1 << 16  # bytes; no message of ours is longer


def at(action: str) -> str:
    """Return an action after "during" or "while": "during the update", "while waiting for F"."""
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
    """Return "rank 3 was" or "ranks 0, 1, 2 and 5 more were"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} was"
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"ranks {', '.join(map(str, ranks[:3]))}{more} were"


class Connection:
    """A socket that carries JSON messages, one per line, and the state of the rank at its end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.buffer = sock, b""
        self.rank, self.action, self.last, self.left = -1, "", time.monotonic(), False

    def send(self, **message: Any) -> None:
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the reading side will see the end of file

    def read(self) -> list[dict[str, Any]] | None:
        """Return the complete messages that arrived, or None at the end or after a malformed one.

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


class Coordinator(threading.Thread):
    """Accept one connection per rank, decide on the first cause, send it to all.

    token: what a connection must present. silence: seconds without a message after which a rank
    counts as lost. beat: seconds between beats.
    """

    def __init__(self, world: int, host: str, token: str, silence: float, beat: float) -> None:
        super().__init__(name="failure-coordinator", daemon=True)
        here = host in ("localhost", "127.0.0.1")
        self.listener = socket.create_server((host if here else "", 0), backlog=world)
        self.port: int = self.listener.getsockname()[1]
        self.world, self.token, self.silence, self.beat = world, token, silence, beat
        self.connections: list[Connection] = []
        self.joined: set[int] = set()
        self.decided: Cause | None = None
        self.weak: list[tuple[float, Cause]] = []  # (when it counts, cause)

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        turn = sent = time.monotonic()
        while len(self.joined) < self.world or any(
            connection.rank >= 0 for connection in self.connections
        ):
            for key, _ in selector.select(timeout=0.1):
                if key.fileobj is self.listener:
                    self.connections.append(Connection(self.listener.accept()[0]))
                    selector.register(
                        self.connections[-1].sock, selectors.EVENT_READ, self.connections[-1]
                    )
                    continue
                connection: Connection = key.data
                messages = connection.read()
                for message in messages or ():
                    self._hear(connection, message)
                if messages is None:
                    selector.unregister(connection.sock)
                    connection.sock.close()
                    self.connections.remove(connection)
                    if not connection.left and connection.rank >= 0:
                        self._decide(self._lost(connection, DIED))
            now = time.monotonic()
            if now - turn > self.silence / 2:  # this process was stopped, not the others
                for connection in self.connections:
                    connection.last = now
            turn = now
            self._judge(now)
            if now - sent > self.beat:
                sent = now
                for connection in self.connections:
                    connection.send(beat=True)
        self.listener.close()

    def _hear(self, connection: Connection, message: dict[str, Any]) -> None:
        connection.last = time.monotonic()
        if connection.rank < 0:
            rank = message.get("rank")
            if message.get("token") != self.token or type(rank) is not int:
                return
            connection.rank = rank
            self.joined.add(rank)
            if self.decided is not None:
                connection.send(cause=vars(self.decided))
        connection.action = message.get("action", connection.action)
        connection.left = connection.left or "bye" in message or "failed" in message
        if "failed" in message:
            cause = Cause(connection.rank, connection.action, message["failed"])
            if message["wait"]:
                self.weak.append((connection.last + message["wait"], cause))
            else:
                self._decide(cause)

    def _lost(self, connection: Connection, why: str) -> Cause:
        """Return the cause for a rank that did not report its own failure: its last action."""
        age = time.monotonic() - connection.last
        return Cause(
            connection.rank, "", f"{why}; its last word, {age:.1f} s before: {connection.action}"
        )

    def _judge(self, now: float) -> None:
        for connection in self.connections:
            silent = connection.rank >= 0 and now - connection.last > self.silence
            if silent and not connection.left:
                connection.left = True
                self._decide(self._lost(connection, "no sign of life"))
        for due, cause in self.weak:
            if now > due:
                self._decide(self._with_straggler(cause))

    def _with_straggler(self, cause: Cause) -> Cause:
        """Return the cause with the ranks that may be behind it: those at another action.

        After a timeout all ranks that still run are candidates. A rank that waits for a message
        waits because of another rank, so it is named only if there is no other candidate.
        """
        others = [x for x in self.connections if not x.left and x.rank >= 0]
        if not any(words in cause.why.lower() for words in ("timed out", "timeout")):
            others = [x for x in others if x.action != cause.action]
        late = [x for x in others if not x.action.startswith("waiting for ")] or others
        ranks_by_action: dict[str, list[int]] = {}
        for connection in sorted(late, key=lambda x: x.rank):
            ranks_by_action.setdefault(connection.action, []).append(connection.rank)
        elsewhere = [f"{_named(ranks)} at: {action}" for action, ranks in ranks_by_action.items()]
        why = "; meanwhile ".join([cause.why, *elsewhere[:1]]) + "".join(
            f", {x}" for x in elsewhere[1:3]
        )
        return Cause(cause.rank, cause.action, why)

    def _decide(self, cause: Cause) -> None:
        if self.decided is None:
            self.decided = cause
            for connection in self.connections:
                connection.send(cause=vars(cause))
