# SPDX-License-Identifier: Apache-2.0
"""Carry messages between the supervisors of a run, over TCP, with a secret that all of them know.

Both sides prove the secret by HMAC-SHA256 over two fresh numbers, one of each side. Every frame
then carries an HMAC under a key made from the secret and those numbers, with the frame's place in
its direction: nothing can be forged, repeated or left out. Nothing is encrypted.

    frame   2 lengths, 4 bytes each | HMAC, 32 bytes | a JSON object | bytes of a file, or none
"""

import hmac
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

HEAD = struct.Struct("!II")
TEXT_LIMIT, BLOB_LIMIT = 4 << 20, 8 << 20  # bytes
GREETING = 5.0  # seconds a stranger may take to prove the secret
STRANGERS = 64  # connections that may be unproven at one time
NONCE = 32


class WireError(Exception):
    """The other side does not know the secret, sent nonsense, or is gone."""


class Channel:
    """One authenticated connection. `host` is the other side's address, `here` this side's.

    silence: seconds without a frame after which the other side counts as lost.
    """

    def __init__(self, sock: socket.socket, secret: bytes, server: bool, silence: float) -> None:
        self._sock, self._lock, self._sent, self._read = sock, threading.Lock(), 0, 0
        self.host: str = sock.getpeername()[0]
        self.here: str = sock.getsockname()[0]
        sock.settimeout(GREETING)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._greet(secret, server)
        except (OSError, WireError):
            sock.close()
            raise
        sock.settimeout(silence)

    def _greet(self, secret: bytes, server: bool) -> None:
        mine = os.urandom(NONCE)
        self._sock.sendall(mine)
        theirs = self._take(NONCE)
        both = mine + theirs if server else theirs + mine
        names = (b"server", b"client") if server else (b"client", b"server")
        proofs = [hmac.digest(secret, b"weft " + name + both, "sha256") for name in names]
        if not server:  # the side that calls proves itself first
            self._sock.sendall(proofs[0])
        if not hmac.compare_digest(self._take(32), proofs[1]):
            raise WireError(f"{self.host} does not know the secret of this run")
        if server:
            self._sock.sendall(proofs[0])
        self._keys = [hmac.digest(secret, b"weft key " + name + both, "sha256") for name in names]

    def _take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._sock.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                raise WireError(f"no sign of life from {self.host}") from None
            except OSError as error:
                raise WireError(f"{self.host}: {error.strerror}") from None
            if not part:
                raise WireError(f"{self.host} closed the connection")
            data += part
        return bytes(data)

    def _mac(self, key: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        """Send a message, and bytes beside it. Raises WireError."""
        text = json.dumps(message).encode()
        assert len(text) <= TEXT_LIMIT and len(blob) <= BLOB_LIMIT
        body = HEAD.pack(len(text), len(blob)) + text + blob
        with self._lock:
            mac = self._mac(self._keys[0], self._sent, body)
            self._sent += 1
            try:
                self._sock.sendall(body[: HEAD.size] + mac + body[HEAD.size :])
            except OSError as error:
                raise WireError(f"{self.host}: {error.strerror or error}") from None

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message and the bytes beside it. Raises WireError."""
        head = self._take(HEAD.size)
        texts, blobs = HEAD.unpack(head)
        if texts > TEXT_LIMIT or blobs > BLOB_LIMIT:
            raise WireError(f"{self.host} sent a frame that is too long")
        mac, body = self._take(32), self._take(texts + blobs)
        if not hmac.compare_digest(mac, self._mac(self._keys[1], self._read, head + body)):
            raise WireError(f"{self.host} sent a frame that was changed on its way")
        self._read += 1
        message = json.loads(body[:texts])
        return message, body[texts:]

    def close(self) -> None:
        """Close the connection; a thread that waits in receive() gets a WireError."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()


def call(host: str, port: int, secret: bytes, silence: float) -> Channel:
    """Connect to a supervisor. Raises WireError."""
    try:
        sock = socket.create_connection((host, port), timeout=GREETING)
        return Channel(sock, secret, False, silence)
    except OSError as error:
        raise WireError(f"{host}:{port}: {error.strerror or error}") from None


class Listener:
    """Accept supervisors on host:port, each in a thread of its own that calls serve(channel).

    A stranger who does not prove the secret in GREETING seconds is cut off. Raises OSError.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, silence: float, serve: Callable[[Channel], None]
    ) -> None:
        self._listener = socket.create_server((host, port), backlog=STRANGERS)
        self.port: int = self._listener.getsockname()[1]
        self._secret, self._silence, self._serve = secret, silence, serve
        self._room = threading.Semaphore(STRANGERS)
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._room.acquire()
            try:
                sock = self._listener.accept()[0]
            except OSError:  # closed, or out of descriptors
                self._room.release()
                if self._listener.fileno() < 0:
                    return
                threading.Event().wait(0.1)
                continue
            threading.Thread(target=self._meet, args=(sock,), daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        try:
            channel = Channel(sock, self._secret, True, self._silence)
        except (OSError, WireError):
            return
        finally:
            self._room.release()
        try:
            self._serve(channel)
        except WireError:
            channel.close()

    def close(self) -> None:
        """Accept nobody any more."""
        self._listener.close()
