# SPDX-License-Identifier: Apache-2.0
"""Authenticate callers by the run's secret, and give each its seat, at little cost for all others.

Anybody who reaches the port may try to stop the run. So admission never blocks, reads at most HELLO
bytes of an unauthenticated caller, keeps at most SPARE callers more than there are seats, each for
at most PATIENCE seconds. With too many the oldest are closed, since ranks of the run are quick.

A seat (rank 3) belongs to the first process that takes it. The same process may reconnect.
Another process is refused: for good if the holder is heard from afterwards, else "not yet", since
the holder may be dead. The owner of this object says who reports and who is gone
(`Seat.last_report`).
"""

import selectors
import socket
import time
from dataclasses import dataclass, field

from training.faults import wire
from training.faults.wire import Connection, Hello

SPARE = 128  # unauthenticated callers
PATIENCE = 5.0  # seconds until a caller must have proved that it knows the secret
ACCEPTS = 64  # connections accepted in one turn
CLAIMS = 64  # processes refused so far that are remembered


@dataclass(eq=False)
class Caller:
    """A connection that is not authenticated yet."""

    connection: Connection
    nonce: bytes
    since: float
    text: bytes = b""


@dataclass(eq=False)
class Seat:
    """The holder of a number. session: its process; b"": closed. last_report: when."""

    session: bytes
    address: str
    last_report: float = field(default_factory=time.monotonic)


class Admission:
    """The callers at a port, and the holder of each seat.

    listener: a socket that listens. secret: the run's. world: of so many ranks, each with a seat.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        selector: selectors.BaseSelector,
        world: int,
    ) -> None:
        listener.setblocking(False)
        self.listener, self.secret, self.selector = listener, secret, selector
        self.world, self.most = world, world + SPARE
        self.callers: list[Caller] = []  # the oldest first
        self.seats: dict[int, Seat] = {}
        self._claims: dict[tuple[int, bytes], float] = {}  # {(seat, session): since when}

    def accept(self, now: float) -> None:
        """Accept new callers; close those that take too long or are too many."""
        for _ in range(ACCEPTS):
            try:
                connection = Connection(self.listener.accept()[0])
            except BlockingIOError:
                break
            except OSError:  # out of descriptors, or a connection that is gone already
                if self.callers:
                    self.dismiss(self.callers[0])
                break
            caller = Caller(connection, wire.nonce(), now)
            self.callers.append(caller)
            self.selector.register(connection.sock, selectors.EVENT_READ, caller)
            connection.send_raw(wire.GREETING + caller.nonce)
        for caller in self.callers[: -self.most]:
            self.dismiss(caller)
        while self.callers and now - self.callers[0].since > PATIENCE:
            self.dismiss(self.callers[0])

    def dismiss(self, caller: Caller) -> None:
        """Close a caller's connection."""
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: Caller) -> None:
        self.callers.remove(caller)
        self.selector.unregister(caller.connection.sock)

    def admit(self, caller: Caller) -> Hello | None:
        """Read from a caller; once it is authenticated, answer it and return who it is.

        Its connection is no longer in the selector then. A caller without the secret, or whose seat
        is taken, gets that answer and is closed.
        """
        connection = caller.connection
        caller.text += connection.receive(wire.HELLO - len(caller.text))
        if not connection.ended and len(caller.text) < wire.HELLO:
            return None
        hello = wire.read_hello(self.secret, caller.text, caller.nonce)
        if hello is None:
            if len(caller.text) == wire.HELLO:
                connection.send_raw(wire.NO)
            self.dismiss(caller)
            return None
        connection.use_keys(self.secret, caller.nonce, hello.nonce, listens=True)
        connection.send_raw(wire.YES)
        why, final = self._take(hello, connection.address)
        if why:
            connection.send({"refused": why, "final": final})
            self.dismiss(caller)
            return None
        connection.send({"welcome": True})
        self._forget(caller)
        return hello

    def _take(self, hello: Hello, address: str) -> tuple[str, bool]:
        """Give a caller its seat; return why it is refused, or "", and whether for good."""
        kind, number, session, _ = hello
        if kind != "rank" or number not in range(self.world):
            return f"there is no {kind} {number} here: ranks end at {self.world - 1}", True
        seat, now = self.seats.get(number), time.monotonic()
        if seat is None or seat.session == session:
            self.seats[number] = Seat(session, address)
            return "", True
        since = self._claims.setdefault((number, session), now)
        if len(self._claims) > CLAIMS:
            del self._claims[next(iter(self._claims))]
        final = not seat.session or seat.last_report > since
        return f"another process, at {seat.address}, is {kind} {number} already", final

    def close_seat(self, number: int) -> None:
        """Refuse this seat to everybody from now on."""
        self.seats[number].session = b""

    def close(self) -> None:
        """Close every socket."""
        self.listener.close()
        for caller in self.callers:
            caller.connection.close()
