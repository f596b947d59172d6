# SPDX-License-Identifier: Apache-2.0
"""Send messages between the ranks and the coordinator of the failure channel, which listens.

    frame                  length of the text, 4 bytes | text: a JSON object

    rank -> coordinator    the hello: {"rank": 3, "session": of its process, "secret": this start's}
    coordinator -> rank    {"refused": why} and the end, or {"welcome": true}
    both                   messages (messages.py)

The secret distinguishes a rank of this start from other callers of the port: another run, a port
scanner. The network must be private, as torch's store and gloo require: frames are neither signed
nor encrypted.
"""

import hashlib
import hmac
import json
import select
import socket
import struct
import threading
import time
from typing import Any

from training.files.untrusted import printable

HEAD = struct.Struct("!I")  # the length of a frame's text in bytes
HELLO, LIMIT = 1 << 10, 1 << 20  # bytes of a hello's text, and of any text, at most
READ = 1 << 16  # bytes read at a time
PRINTED = 2000  # characters, at most, of one text

Fields = dict[str, Any]


class Refused(ConnectionError):
    """The coordinator rejects this rank: retrying does not help."""


def secret_of(run: bytes, salt: str) -> str:
    """Return the secret in the hellos of one start: an HMAC of its salt under the run's secret,
    which is never sent.
    """
    return hmac.new(run, salt.encode(), hashlib.sha256).hexdigest()


class Connection:
    """A non-blocking socket that carries frames both ways; only `wait` blocks.

    address, here: the numeric addresses of the peer and of this side. limit: bytes of a text that
    is read, at most. ended: how it ended, as far as read() has seen: "" (not yet), "closed" (the
    peer's kernel closed it in order), or "broken" (reset, timed out, or an invalid frame).
    """

    def __init__(self, sock: socket.socket, limit: int = LIMIT) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address: str = sock.getpeername()[0]
        self.here: str = sock.getsockname()[0]
        self.sock, self.limit, self.ended = sock, limit, ""
        self._in, self._out = bytearray(), bytearray()
        self._reset = False  # a send saw a reset, which no read reports then
        self._lock = threading.Lock()  # several threads send

    def send(self, message: Fields) -> None:
        """Queue a message; send as much as the socket accepts now."""
        text = json.dumps(message).encode()
        assert len(text) <= LIMIT, "the frame is too long"
        with self._lock:
            self._out += HEAD.pack(len(text)) + text
            self._flush()

    def flush(self) -> bool:
        """Send queued bytes as far as the socket accepts them; return whether none are left."""
        with self._lock:
            self._flush()
            return not self._out

    def waiting(self) -> int:
        """Return the number of queued bytes that are not sent yet."""
        return len(self._out)

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._out.clear()  # read() will report the end
            self._reset = self._reset or isinstance(error, ConnectionResetError)

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to read; return whether there is."""
        poll = select.poll()  # select.select() takes no descriptor above 1023
        try:
            poll.register(self.sock, select.POLLIN)
        except (OSError, ValueError):
            return True  # closed
        return bool(poll.poll(1000 * max(0.0, seconds)))

    def read(self) -> list[Fields]:
        """Return the messages that have arrived completely; `ended` is "" if more may arrive."""
        messages = list[Fields]()
        try:
            data = self.sock.recv(READ)
            if not data:
                self.ended = "broken" if self._reset else "closed"
            self._in += data
            while len(self._in) >= HEAD.size:
                end = HEAD.size + HEAD.unpack_from(self._in)[0]
                if end - HEAD.size > self.limit:
                    raise ValueError("too long")
                if len(self._in) < end:
                    break
                message = json.loads(self._in[HEAD.size : end])
                if not isinstance(message, dict):
                    raise ValueError("not an object")
                messages.append(message)
                del self._in[:end]
        except BlockingIOError:
            pass
        except (OSError, ValueError, RecursionError):
            self.ended = "broken"
        return messages

    def close(self) -> None:
        """Close the socket in this process; a forked child may still hold it open."""
        self.sock.close()


def join(
    address: tuple[str, int], secret: str, rank: int, session: str, seconds: float
) -> tuple[Connection, list[Fields]]:
    """Connect to the coordinator, send the hello; return the connection and its first messages.

    The welcome is not among the messages. seconds: for all of it. Raises OSError:
    ConnectionRefusedError where nothing listens, Refused where the coordinator rejects this rank,
    TimeoutError.
    """
    deadline = time.monotonic() + seconds
    sock = socket.create_connection(address, timeout=seconds)
    try:
        connection, messages = Connection(sock), list[Fields]()
        connection.send({"rank": rank, "session": session, "secret": secret})
        while not messages and not connection.ended:
            if not connection.wait(deadline - time.monotonic()):
                raise TimeoutError("no answer")
            messages = connection.read()
        if not messages:
            raise ConnectionError("it closed the connection; it may be busy")
        first = messages.pop(0)
        if "refused" in first:
            raise Refused(printable(str(first["refused"]), most=PRINTED))
        if "welcome" not in first:
            raise ConnectionError("the program that listens there is not a rank of Weft")
    except BaseException:
        sock.close()
        raise
    return connection, messages
