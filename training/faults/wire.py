# SPDX-License-Identifier: Apache-2.0
"""Carry messages between processes that know one secret, and nobody else's.

Ranks talk over it to the coordinator of the failure channel, which listens (admission.py):

    listener -> caller   greeting: GREETING and the listener's nonce
    caller -> listener   hello: seat, session, the caller's nonce, HMAC(secret, all of it + nonce)
    listener -> caller   NO and the end, where that HMAC is wrong; else YES
    both                 frames; the listener's first is its welcome, or why it refuses the caller

    frame                length of the text | HMAC | text: a JSON object

The secret itself never travels. A hello has one length, and nothing in it is read before its HMAC
is right. The frames' HMACs have keys made from both nonces and a number, so that no frame can be
forged, changed, repeated or moved; the first one proves that the listener knows the secret, too.
Nothing is encrypted.
"""

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any, NamedTuple

GREETING = b"weft 3 "
NONCE = 32  # bytes: hexadecimal digits of 16 random bytes
SEAT = 20  # bytes: "rank 17", padded
HELLO = SEAT + 2 * NONCE + 64  # bytes: seat, session, nonce, HMAC
NO, YES = b"-", b"+"
HEAD = struct.Struct("!I")  # bytes of a frame's text
MAC = 32  # bytes
TEXT_LIMIT = 1 << 20  # bytes; no frame of ours has more
READ = 1 << 16  # bytes read at a time
PRINTED = 2000  # characters, at most, of one text

Fields = dict[str, Any]


class Refused(ConnectionError):
    """The listener knows the secret and does not take this caller.

    final: it will not later, either. Otherwise whoever has the seat may be gone soon.
    """

    def __init__(self, why: str, final: bool) -> None:
        super().__init__(why)
        self.final = final


class AnotherSecret(ConnectionError):
    """The listener says that this caller's secret is not the run's."""


class Hello(NamedTuple):
    """Who calls: "rank" 3. session: of its process. nonce: its own."""

    kind: str
    number: int
    session: bytes
    nonce: bytes


def printable(text: str) -> str:
    """Return text, cut to PRINTED characters, with control characters written as escapes."""
    cut = text if len(text) <= PRINTED else text[: PRINTED - 3] + "..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def nonce() -> bytes:
    """Return random hexadecimal digits."""
    return secrets.token_hex(NONCE // 2).encode()


def proof(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of parts, each of a fixed length, in hexadecimal digits."""
    text = b"\0".join([purpose.encode(), *parts])
    return hmac.new(secret, text, hashlib.sha256).hexdigest().encode()


def hello(
    secret: bytes, kind: str, number: int, session: bytes, own: bytes, listener: bytes
) -> bytes:
    """Return what a caller sends first. own, listener: the two nonces."""
    text = f"{kind} {number}".encode().ljust(SEAT) + session + own
    return text + proof(secret, "hello", text, listener)


def read_hello(secret: bytes, text: bytes, listener: bytes) -> Hello | None:
    """Return what a hello says, or None where its author does not know the secret."""
    signed, mac = text[:-64], text[-64:]
    right = proof(secret, "hello", signed, listener)
    if len(text) != HELLO or not hmac.compare_digest(mac, right):
        return None
    kind, _, number = signed[:SEAT].decode("ascii", "replace").strip().rpartition(" ")
    seat = int(number) if number.isdecimal() else -1
    return Hello(kind, seat, signed[SEAT : SEAT + NONCE], signed[SEAT + NONCE :])


class Connection:
    """A socket that carries frames both ways and waits for nobody unless asked to.

    address, here: the numeric addresses of the peer and of this side. ended: how it ended, as far
    as read() has seen: "" (not yet), "closed" (the peer's kernel closed it in order), or "broken"
    (reset, timed out, or not what our peer sends). lost: something could not be sent any more.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address: str = sock.getpeername()[0]
        self.here: str = sock.getsockname()[0]
        self.sock, self.ended, self.lost = sock, "", False
        self._in, self._out = bytearray(), bytearray()
        self._keys, self._counts = (b"", b""), [0, 0]  # to read, to write
        self._reset = False  # a send saw the reset; then no read does
        self._lock = threading.Lock()  # several threads send

    def use_keys(self, secret: bytes, listener: bytes, caller: bytes, listens: bool) -> None:
        """Take the keys of this connection, from both nonces. listens: this side does."""
        names = ("to listener", "to caller") if listens else ("to caller", "to listener")
        read, write = (
            hmac.digest(secret, b"\0".join([name.encode(), listener, caller]), "sha256")
            for name in names
        )
        self._keys = (read, write)

    def _mac(self, way: int, *parts: bytes) -> bytes:
        mac = hmac.new(self._keys[way], self._counts[way].to_bytes(8, "big"), "sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()

    def send(self, message: Fields) -> None:
        """Queue a message; send what the socket takes now."""
        text = json.dumps(message).encode()
        assert len(text) <= TEXT_LIMIT, "the frame is too long"
        head = HEAD.pack(len(text))
        with self._lock:
            mac = self._mac(1, head, text)
            self._counts[1] += 1
            self._out += head + mac + text
            self._flush()

    def send_raw(self, data: bytes) -> None:
        """Queue bytes that are no frame."""
        with self._lock:
            self._out += data
            self._flush()

    def flush(self) -> bool:
        """Send what waits, as far as the socket takes it; return whether nothing is left."""
        with self._lock:
            self._flush()
            return not self._out

    def waiting(self) -> int:
        """Return how many bytes the socket has not taken yet."""
        return len(self._out)

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._out.clear()  # read() will see the end
            self.lost = True
            self._reset = self._reset or isinstance(error, ConnectionResetError)

    def wait(self, seconds: float, to_send: bool = False) -> bool:
        """Wait until there is something to read (or room to send); return whether there is."""
        poll = select.poll()  # select.select() knows no descriptor above 1023
        try:
            poll.register(self.sock, select.POLLOUT if to_send else select.POLLIN)
        except (OSError, ValueError):
            return True  # closed
        return bool(poll.poll(1000 * max(0.0, seconds)))

    def receive(self, size: int) -> bytes:
        """Return at most `size` bytes that are there, b"" where none are; note an end."""
        try:
            data = self.sock.recv(size)
        except BlockingIOError:
            return b""
        except OSError:
            self.ended = "broken"
            return b""
        if not data:
            self.ended = "broken" if self._reset else "closed"
        return data

    def read(self) -> list[Fields]:
        """Return the messages that have arrived whole; `ended` says whether more may come."""
        messages = []
        try:
            self._in += self.receive(READ)
            while len(self._in) >= HEAD.size and not self._lacking():
                messages.append(self._take())
        except (ValueError, RecursionError):
            self.ended = "broken"
        return messages

    def _lacking(self) -> int:
        """Return how many bytes the frame that has begun lacks. Raises ValueError: none of ours."""
        if len(self._in) < HEAD.size:
            return 0
        (size,) = HEAD.unpack_from(self._in)
        if size > TEXT_LIMIT:
            raise ValueError("too long")
        return max(0, HEAD.size + MAC + int(size) - len(self._in))

    def _take(self) -> Fields:
        """Take the first frame. Raises ValueError, RecursionError where it is none of ours."""
        start = HEAD.size + MAC
        end = start + HEAD.unpack_from(self._in)[0]
        head, mac, text = (
            bytes(self._in[a:b]) for a, b in ((0, HEAD.size), (HEAD.size, start), (start, end))
        )
        del self._in[:end]
        if not hmac.compare_digest(mac, self._mac(0, head, text)):
            raise ValueError("not from our peer, or changed on the way")
        self._counts[0] += 1
        message = json.loads(text)
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message

    def close(self) -> None:
        """Close the socket in this process; a forked child that has it may keep it open."""
        self.sock.close()


def join(
    address: tuple[str, int], secret: bytes, kind: str, number: int, session: bytes, seconds: float
) -> tuple[Connection, list[Fields]]:
    """Call a listener and show each other the secret; return its first messages after the welcome.

    seconds: for all of it. Raises OSError: ConnectionRefusedError where nothing listens, Refused
    and AnotherSecret where the listener says no, TimeoutError.
    """
    deadline = time.monotonic() + seconds
    sock = socket.create_connection(address, timeout=seconds)
    try:
        connection = Connection(sock)
        greeting = _exactly(connection, len(GREETING) + NONCE, deadline)
        own, listener = nonce(), greeting[len(GREETING) :]
        if not greeting.startswith(GREETING) or len(listener) < NONCE:
            raise ConnectionError("the listener there is not Weft, or is busy")
        connection.use_keys(secret, listener, own, listens=False)
        connection.send_raw(hello(secret, kind, number, session, own, listener))
        answer = _exactly(connection, 1, deadline)
        if answer == NO:
            raise AnotherSecret(
                "it has another secret: all ranks of a run need the same WEFT_SECRET"
            )
        messages: list[Fields] = []
        while answer == YES and not messages and _more(connection, deadline):
            messages = connection.read()
        if not messages:
            broken = answer and connection.ended == "broken"
            raise ConnectionError(
                "it does not know this secret"
                if broken
                else "it closed the connection: it may be busy"
            )
        first = messages.pop(0)
        if "refused" in first:
            raise Refused(printable(str(first["refused"])), bool(first.get("final")))
    except BaseException:
        sock.close()
        raise
    return connection, messages


def _exactly(connection: Connection, size: int, deadline: float) -> bytes:
    """Return so many bytes, fewer at the end. Raises TimeoutError."""
    data = b""
    while len(data) < size and _more(connection, deadline):
        data += connection.receive(size - len(data))
    return data


def _more(connection: Connection, deadline: float) -> bool:
    """Wait for something to read; return False at the end. Raises TimeoutError."""
    if connection.ended:
        return False
    if not connection.wait(deadline - time.monotonic()):
        raise TimeoutError("no answer")
    return True
