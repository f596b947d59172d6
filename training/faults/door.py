# SPDX-License-Identifier: Apache-2.0
"""Let in those who know the run's secret, each to a seat of its own; waste little on all others.

Whoever reaches the port may try to stop the run. So the door waits for nobody, reads HELLO bytes at
most from a stranger, keeps SPARE strangers at most beside as many as there are seats, and each for
PATIENCE seconds at most, whatever it sends. Too many: the oldest go, since our own are quick.

A seat (rank 3, node 1) belongs to the first process that takes it. The same process may come back
to it after its connection broke. Another process is refused: at once for good if the holder is
heard after it came, else "not yet", since the holder may be dead. The owner of the door says who
is heard and who is gone (`Seat.heard`, `free`).
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from training.faults import wire
from training.faults.wire import Connection, Hello

SPARE = 128  # strangers
PATIENCE = 5.0  # seconds until a stranger must have shown that it knows the secret
ACCEPTS = 64  # connections accepted in one turn
CLAIMS = 64  # processes refused so far that are remembered
NAMED = 8  # hosts with another secret that are spoken of


@dataclass(eq=False)
class Stranger:
    """A connection that has not yet shown who it is."""

    connection: Connection
    nonce: bytes
    since: float
    text: bytes = b""


@dataclass(eq=False)
class Seat:
    """Who sits there. session: of its process; b"": nobody may any more. heard: when it was."""

    session: bytes
    address: str
    heard: float = field(default_factory=time.monotonic)


class Door:
    """The strangers at a port, and who sits where.

    listener: a socket that listens. secret: what lets them in. kind, numbers: the seats. visitors:
    kinds of callers that need no seat. wrong: called with the address of a host that calls with
    another secret, once.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        selector: selectors.BaseSelector,
        kind: str,
        numbers: range,
        visitors: tuple[str, ...] = (),
        wrong: Callable[[str], None] = lambda address: None,
    ) -> None:
        listener.setblocking(False)
        self.listener, self.secret, self.selector = listener, secret, selector
        self.kind, self.numbers, self.visitors = kind, numbers, visitors
        self.most = len(numbers) + SPARE
        self.strangers: list[Stranger] = []  # the oldest first
        self.seats: dict[int, Seat] = {}
        self._claims: dict[tuple[int, bytes], float] = {}  # {(seat, session): since when}
        self._lock = threading.Lock()  # of the seats: another thread may free one
        self._wrong, self._named = wrong, set[str]()

    def accept(self, now: float) -> None:
        """Accept those who wait, and send away those who wait too long or are too many."""
        for _ in range(ACCEPTS):
            try:
                connection = Connection(self.listener.accept()[0])
            except BlockingIOError:
                break
            except OSError:  # out of descriptors, or a connection that is gone already
                if self.strangers:
                    self.dismiss(self.strangers[0])
                break
            stranger = Stranger(connection, wire.nonce(), now)
            self.strangers.append(stranger)
            self.selector.register(connection.sock, selectors.EVENT_READ, stranger)
            connection.send_raw(wire.GREETING + stranger.nonce)
        for stranger in self.strangers[: -self.most]:
            self.dismiss(stranger)
        while self.strangers and now - self.strangers[0].since > PATIENCE:
            self.dismiss(self.strangers[0])

    def dismiss(self, stranger: Stranger) -> None:
        """Close a stranger's connection."""
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: Stranger) -> None:
        self.strangers.remove(stranger)
        self.selector.unregister(stranger.connection.sock)

    def admit(self, stranger: Stranger) -> Hello | None:
        """Read from a stranger; return who it is once it may come in, which it is told.

        Its connection is the caller's from then on, and no longer in the selector. One that does
        not know the secret or whose seat is taken is told so and sent away.
        """
        connection = stranger.connection
        stranger.text += connection.receive(wire.HELLO - len(stranger.text))
        if not connection.ended and len(stranger.text) < wire.HELLO:
            return None
        hello = wire.read_hello(self.secret, stranger.text, stranger.nonce)
        if hello is None:
            if len(stranger.text) == wire.HELLO:
                connection.send_raw(wire.NO)
                self._note(connection.address)
            self.dismiss(stranger)
            return None
        connection.use_keys(self.secret, stranger.nonce, hello.nonce, listens=True)
        connection.send_raw(wire.YES)
        why, final = self._take(hello, connection.address)
        if why:
            connection.send({"refused": why, "final": final})
            self.dismiss(stranger)
            return None
        connection.send({"welcome": True})
        self._forget(stranger)
        return hello

    def _note(self, address: str) -> None:
        if address not in self._named and len(self._named) < NAMED:
            self._named.add(address)
            self._wrong(address)

    def _take(self, hello: Hello, address: str) -> tuple[str, bool]:
        """Give a caller its seat; return why it does not get it, or "", and whether for good."""
        if hello.kind in self.visitors:
            return "", True
        kind, number, session, _ = hello
        if kind != self.kind or number not in self.numbers:
            last = self.numbers[-1] if self.numbers else -1
            return f"there is no {kind} {number} here: {self.kind}s end at {last}", True
        with self._lock:
            seat, now = self.seats.get(number), time.monotonic()
            if seat is None or seat.session == session:
                self.seats[number] = Seat(session, address)
                return "", True
            since = self._claims.setdefault((number, session), now)
            if len(self._claims) > CLAIMS:
                del self._claims[next(iter(self._claims))]
            final = not seat.session or seat.heard > since
            return f"another process, at {seat.address}, is {kind} {number} already", final

    def close_seat(self, number: int) -> None:
        """Let nobody sit there any more."""
        with self._lock:
            self.seats[number].session = b""

    def free(self, number: int, seat: Seat) -> None:
        """Free a seat whose holder is gone, unless somebody sits there already."""
        with self._lock:
            if self.seats.get(number) is seat:
                del self.seats[number]

    def close(self) -> None:
        """Close every socket."""
        self.listener.close()
        for stranger in self.strangers:
            stranger.connection.close()
