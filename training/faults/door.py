# SPDX-License-Identifier: Apache-2.0
"""Let in those who know the run's secret; waste little on all others.

Whoever reaches the failure channel's port may try to stop the run. So the door waits for nobody,
reads HELLO bytes at most from a stranger, keeps SPARE strangers at most beside as many as there are
ranks, and each for PATIENCE seconds at most. Too many: the oldest go, since a rank is quick.
"""

import selectors
import socket
from dataclasses import dataclass

from training.faults import wire
from training.faults.wire import Connection

SPARE = 128  # strangers
PATIENCE = 5.0  # seconds until a stranger must have shown that it knows the secret
ACCEPTS = 64  # connections accepted in one turn


@dataclass(eq=False)
class Stranger:
    """A connection that has not yet shown which rank it is."""

    connection: Connection
    nonce: bytes
    since: float
    address: str
    text: bytes = b""


class Door:
    """The strangers at a port. listener: a socket that listens. secret: what lets them in."""

    def __init__(
        self, listener: socket.socket, secret: bytes, selector: selectors.BaseSelector, world: int
    ) -> None:
        listener.setblocking(False)
        self.listener, self.secret, self.selector = listener, secret, selector
        self.most = world + SPARE
        self.strangers: list[Stranger] = []  # the oldest first

    def accept(self, now: float) -> None:
        """Accept those who wait, and send away those who wait too long or are too many."""
        for _ in range(ACCEPTS):
            try:
                sock, address = self.listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except BlockingIOError:
                break
            except OSError:  # out of descriptors, or a connection that is gone already
                if self.strangers:
                    self.dismiss(self.strangers[0])
                break
            stranger = Stranger(Connection(sock), wire.nonce(), now, address[0])
            self.strangers.append(stranger)
            self.selector.register(sock, selectors.EVENT_READ, stranger)
            stranger.connection.send_raw(wire.GREETING + stranger.nonce)
        for stranger in self.strangers[: -self.most]:
            self.dismiss(stranger)
        while self.strangers and now - self.strangers[0].since > PATIENCE:
            self.dismiss(self.strangers[0])

    def dismiss(self, stranger: Stranger) -> None:
        """Close a stranger's connection."""
        self.strangers.remove(stranger)
        self.selector.unregister(stranger.connection.sock)
        stranger.connection.close()

    def read(self, stranger: Stranger) -> tuple[int, bytes] | None:
        """Return a stranger's rank and session once it has shown that it knows the secret.

        Its connection has its keys then. One that shows that it does not is sent away.
        """
        connection = stranger.connection
        stranger.text += connection.receive(wire.HELLO - len(stranger.text))
        if not connection.ended and len(stranger.text) < wire.HELLO:
            return None
        hello = wire.read_hello(self.secret, stranger.text, stranger.nonce)
        if hello is None:
            self.dismiss(stranger)
            return None
        rank, session, own = hello
        connection.use_keys(self.secret, stranger.nonce, own, is_hub=True)
        return rank, session

    def close(self) -> None:
        """Close every socket."""
        self.listener.close()
        for stranger in self.strangers:
            stranger.connection.close()
