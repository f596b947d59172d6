# SPDX-License-Identifier: Apache-2.0
"""Let the supervisors of a run talk, over the wire of training/faults, a thread a connection.

A node sits at node 0's port under its number; a node that fetches a copy is a visitor.
"""

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from training.faults import wire
from training.faults.admission import Admission, Caller, Seat

GREETING = 5.0  # seconds for a call to be answered, from the connection to the welcome
POLL = 0.05  # seconds between two looks for callers
VISIT = "copy"  # the kind of a caller that fetches files


class WireError(Exception):
    """The other side does not take this one, sent nonsense, or is gone.

    final: to try again would not help.
    """

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class Channel:
    """One authenticated connection. `host` is the other side's address, `here` this side's.

    silence: seconds without a message after which the other side counts as lost.
    """

    def __init__(self, connection: wire.Connection, silence: float, received: Any = ()) -> None:
        self._connection, self._silence = connection, silence
        self._received = deque[tuple[wire.Fields, bytes]](received)
        self.host, self.here = connection.address, connection.here

    def send(self, message: wire.Fields, blob: bytes = b"") -> None:
        """Send a message, and bytes with it. Raises WireError."""
        deadline = time.monotonic() + self._silence
        self._connection.send(message, blob)
        while not self._connection.flush():
            if not self._connection.wait(deadline - time.monotonic(), to_send=True):
                raise WireError(f"{self.host} does not read")
        if self._connection.lost:
            raise WireError(f"{self.host} closed the connection")

    def receive(self) -> tuple[wire.Fields, bytes]:
        """Return the next message and the bytes with it. Raises WireError."""
        while not self._received:
            if self._connection.ended == "closed":
                raise WireError(f"{self.host} closed the connection")
            if self._connection.ended:
                raise WireError(f"the connection to {self.host} broke")
            if not self._connection.wait(self._silence):
                raise WireError(f"no heartbeat from {self.host}")
            self._received.extend(self._connection.read())
        return self._received.popleft()

    def close(self) -> None:
        """Close the connection; a thread that waits in receive() gets a WireError."""
        self._connection.hang_up()
        self._connection.close()


def _key(secret: bytes) -> bytes:
    return wire.proof(secret, "supervisors")


def call(
    host: str, port: int, secret: bytes, silence: float, *, kind: str = VISIT, number: int = 0,
    session: bytes | None = None,
) -> Channel:  # fmt: skip
    """Connect to a supervisor. Raises WireError."""
    try:
        connection, received = wire.join(
            (host, port), _key(secret), kind, number, session or wire.nonce(), GREETING
        )
    except OSError as error:
        final = isinstance(error, wire.AnotherSecret) or getattr(error, "final", False)
        raise WireError(f"{host}:{port}: {error.strerror or error}", final) from None
    return Channel(connection, silence, received)


class Listener:
    """Take calls on host:port, each in a thread of its own: serve(channel, number, seat).

    nodes: the numbers of nodes that have a seat here. Number and seat are None for a visitor.
    wrong: called with the address of a host that calls with another secret. Raises OSError.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, silence: float,
        serve: Callable[[Channel, int | None, Seat | None], None],
        nodes: range, wrong: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._selector, self._silence, self._serve = selectors.DefaultSelector(), silence, serve
        listener = socket.create_server((host, port), backlog=128)
        self.port: int = listener.getsockname()[1]
        self.admission = Admission(
            listener, _key(secret), self._selector, "node", nodes, visitors=(VISIT,), wrong=wrong
        )
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=POLL):
                assert isinstance(key.data, Caller), "nobody else is in the selector"
                if (hello := self.admission.admit(key.data)) is not None:
                    channel = Channel(key.data.connection, self._silence)
                    seated = hello.kind != VISIT
                    number = hello.number if seated else None
                    seat = self.admission.seats[hello.number] if seated else None
                    threading.Thread(
                        target=self._meet, args=(channel, number, seat), daemon=True
                    ).start()
            self.admission.accept(time.monotonic())
        self.admission.close()
        self._selector.close()

    def _meet(self, channel: Channel, number: int | None, seat: Seat | None) -> None:
        try:
            self._serve(channel, number, seat)
        except WireError:
            channel.close()
        finally:
            if number is not None and seat is not None:
                self.admission.free(number, seat)

    def close(self) -> None:
        """Take no more calls."""
        self._closed = True
        self._thread.join()
