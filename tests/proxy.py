# SPDX-License-Identifier: Apache-2.0
"""A network between two ranks that a test can break: a TCP proxy in a thread."""

import selectors
import socket
import struct
import threading
from contextlib import suppress


class Proxy(threading.Thread):
    """Carries connections from its port to another one.

    asked: "" (carry), "reset" (break what is open, once), "drop" (carry nothing, in silence),
    "away" (break what is open, and take nothing new).
    """

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self.target, self.asked, self.over = target, "", False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.peers: dict[socket.socket, socket.socket] = {}
        self.accepted = 0
        self.start()

    def run(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        while not self.over:
            if self.asked in ("reset", "away"):
                self.asked = "" if self.asked == "reset" else "away"
                for sock in list(self.peers):
                    self.reset(sock)
            for key, _ in self.selector.select(timeout=0.01):
                with suppress(OSError, KeyError):
                    if key.fileobj is self.listener:
                        self.accept()
                    else:
                        self.carry(key.fileobj)
        for sock in [self.listener, *self.peers]:
            sock.close()

    def accept(self) -> None:
        here = self.listener.accept()[0]
        if self.asked:
            here.close()
            return
        there = socket.create_connection(self.target)
        self.accepted += 1
        for a, b in ((here, there), (there, here)):
            self.peers[a] = b
            self.selector.register(a, selectors.EVENT_READ)

    def carry(self, sock: socket.socket) -> None:
        if self.asked == "drop":
            self.selector.unregister(sock)
            return
        other = self.peers[sock]
        data = sock.recv(65536)
        if data:
            other.sendall(data)
        else:  # in order, as the kernel of a killed process closes it
            self.selector.unregister(sock)
            del self.peers[sock]
            other.shutdown(socket.SHUT_WR)

    def reset(self, sock: socket.socket) -> None:
        del self.peers[sock]
        with suppress(KeyError, ValueError):
            self.selector.unregister(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
