# SPDX-License-Identifier: Apache-2.0
"""Carry the failure channel's messages between processes that know one secret, and nobody else's.

    hub   -> rank   greeting: GREETING and the hub's nonce
    rank  -> hub    hello: rank, session, its nonce, HMAC(secret, all of these and the hub's nonce)
    both            messages, a line each, which end in an HMAC with a key made from both nonces

The hub's first message proves to the rank that the hub knows the secret, too. The secret itself
never travels. A hello has one length, and nothing in it is read before its HMAC is right. A line is
`kind field ... HMAC`; FORMAT lists the kinds and the types of their fields. Text that came from the
wire has no control characters left: it may be printed.
"""

import hashlib
import hmac
import re
import secrets
import select
import socket
import threading
import time
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

FORMAT: dict[str, dict[str, type]] = {
    "beat": {"action": str},  # of a rank
    "failed": {"action": str, "why": str, "wait": float},  # wait: seconds for a better explanation
    "status": {"said": str},  # of a rank that stands still: HangWatch.status, in JSON
    "stack": {"text": str},  # of a rank, after a report
    "place": {"said": str},  # where a rank's process is, the hub's too: Dump.address, in JSON
    "unheard": {"address": str, "seconds": float},  # no acknowledgement from there for so long
    "bye": {},
    "alive": {"action": str},  # the hub's beat, with what rank 0 is doing
    "report": {"text": str},  # of the hub to a rank that hangs
    "cause": {"rank": int, "action": str, "why": str, "quick": int, "address": str},
    "refused": {"why": str},
}
TEXT = 2000  # characters, at most, of one field
LINE = 1 << 16  # bytes; no line of ours is longer
QUEUE = 1 << 18  # bytes that may wait for a peer that does not read
NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,9})?")
GREETING = b"weft 2 "
NONCE = 32  # bytes: hexadecimal digits of 16 random bytes
RANK = 8  # bytes: decimal digits
HELLO = RANK + 2 * NONCE + 64  # bytes: rank, session, nonce, HMAC


class Message(NamedTuple):
    """One message: its kind and the fields that FORMAT names."""

    kind: str
    fields: dict[str, Any]


def printable(text: str) -> str:
    """Return text, cut to TEXT characters, with control characters written as escapes."""
    cut = text if len(text) <= TEXT else text[: TEXT - 3] + "..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def nonce() -> bytes:
    """Return random hexadecimal digits."""
    return secrets.token_hex(NONCE // 2).encode()


def proof(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of parts, each of a fixed length, in hexadecimal digits."""
    said = b"\0".join([purpose.encode(), *parts])
    return hmac.new(secret, said, hashlib.sha256).hexdigest().encode()


def hello(secret: bytes, rank: int, session: bytes, own: bytes, hub: bytes) -> bytes:
    """Return what rank says first. session: its process. own, hub: the two nonces."""
    said = b"%0*d" % (RANK, rank) + session + own
    return said + proof(secret, "hello", said, hub)


def read_hello(secret: bytes, text: bytes, hub: bytes) -> tuple[int, bytes, bytes] | None:
    """Return rank, session and nonce of a hello, or None where it does not know the secret."""
    said, mac = text[:-64], text[-64:]
    if len(text) != HELLO or not hmac.compare_digest(mac, proof(secret, "hello", said, hub)):
        return None
    return int(said[:RANK]), said[RANK : RANK + NONCE], said[RANK + NONCE :]


def encode(kind: str, fields: dict[str, Any]) -> bytes:
    """Return a message without its HMAC."""
    names = FORMAT[kind]
    assert fields.keys() == names.keys(), f"{kind} has {sorted(names)}, not {sorted(fields)}"
    words = [kind]
    for name, of in names.items():
        value = fields[name]
        words.append(
            quote(printable(value).encode("utf-8", "replace"), safe="")
            if of is str
            else f"{value:.6f}"
            if of is float
            else str(value)
        )
    return " ".join(words).encode("ascii")


def decode(line: bytes) -> Message:
    """Return the message in a line without its HMAC. Raises ValueError where it is none."""
    kind, *words = line.decode("ascii").split(" ")
    names = FORMAT.get(kind)
    if names is None or len(words) != len(names):
        raise ValueError("no message of ours")
    fields: dict[str, Any] = {}
    for (name, of), word in zip(names.items(), words, strict=True):
        if of is str:
            fields[name] = printable(unquote(word, errors="strict"))
        elif NUMBER.fullmatch(word):
            fields[name] = of(word)
        else:
            raise ValueError("not a number")
    return Message(kind, fields)


class Connection:
    """A socket that carries messages both ways and waits for nobody.

    ended: how it ended, as far as read() has seen: "" (not yet), "closed" (the peer's kernel closed
    it in order), or "broken" (reset, timed out, or not what our peer sends).
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.ended = sock, ""
        self._in, self._out = b"", b""
        self._keys, self._counts = (b"", b""), [0, 0]  # to read, to write
        self._reset = False  # so a send was told, and then no read is
        self._lock = threading.Lock()  # two threads of a rank send

    def use_keys(self, secret: bytes, hub: bytes, own: bytes, is_hub: bool) -> None:
        """Take the keys of this connection. hub, own: the hub's nonce and the rank's."""
        names = ("to hub", "to rank") if is_hub else ("to rank", "to hub")
        up, down = (proof(secret, name, hub, own) for name in names)
        self._keys = (up, down)

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message and send what the socket takes now; flush() sends the rest."""
        with self._lock:
            if len(self._out) < QUEUE:
                line = encode(kind, fields)
                line = line + b" " + self._mac(1, line) + b"\n"
                self._counts[1] += 1
                self._out += line
            self._flush()

    def send_raw(self, data: bytes) -> None:
        """Queue bytes that are no message."""
        with self._lock:
            self._out += data
            self._flush()

    def flush(self) -> bool:
        """Send what waits, as far as the socket takes it; return whether nothing is left."""
        with self._lock:
            self._flush()
            return not self._out

    def _flush(self) -> None:
        try:
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._out = b""  # read() will see the end
            self._reset = self._reset or isinstance(error, ConnectionResetError)

    def _mac(self, way: int, line: bytes) -> bytes:
        count = b"%d" % self._counts[way]
        return proof(self._keys[way], "line", count, line)[:NONCE]

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to read, at most so long; return whether there is."""
        poll = select.poll()  # select.select() knows no descriptor above 1023
        try:
            poll.register(self.sock, select.POLLIN)
        except (OSError, ValueError):
            return True  # closed
        return bool(poll.poll(1000 * seconds))

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

    def read(self) -> list[Message]:
        """Return the messages that have arrived whole; `ended` says whether more may come."""
        *lines, self._in = (self._in + self.receive(LINE)).split(b"\n")
        messages = []
        try:
            for line in lines:
                text, _, mac = line.rpartition(b" ")
                if not hmac.compare_digest(mac, self._mac(0, text)):
                    raise ValueError("not from our peer, or changed on the way")
                self._counts[0] += 1
                messages.append(decode(text))
            if len(self._in) > LINE:
                raise ValueError("too long")
        except ValueError:
            self.ended = "broken"
        return messages

    def close(self) -> None:
        self.sock.close()


class Refused(ConnectionError):
    """The hub knows the secret and does not take this rank."""


def join(
    address: tuple[str, int], secret: bytes, rank: int, session: bytes, seconds: float
) -> tuple[Connection, list[Message]]:
    """Connect to the hub and show each other the secret; return its first messages, too.

    Raises OSError: ConnectionRefusedError where nothing listens, Refused where the hub says no,
    TimeoutError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    sock = socket.create_connection(address, timeout=seconds)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection, greeting = Connection(sock), b""
        while len(greeting) < len(GREETING) + NONCE and _more(connection, deadline):
            greeting += connection.receive(len(GREETING) + NONCE - len(greeting))
        own, hub = nonce(), greeting[len(GREETING) :]
        if not greeting.startswith(GREETING) or len(hub) < NONCE:
            raise ConnectionError("who listens there is not Weft, or is busy")
        connection.use_keys(secret, hub, own, is_hub=False)
        connection.send_raw(hello(secret, rank, session, own, hub))
        messages: list[Message] = []
        while not messages and _more(connection, deadline):
            messages = connection.read()
        if not messages:
            raise ConnectionError("it knows another secret: all ranks of a run share one")
        if messages[0].kind == "refused":
            raise Refused(messages[0].fields["why"])
    except BaseException:
        sock.close()
        raise
    return connection, messages


def _more(connection: Connection, deadline: float) -> bool:
    """Wait for something to read; return False at the end. Raises TimeoutError."""
    if connection.ended:
        return False
    if not connection.wait(max(0.0, deadline - time.monotonic())):
        raise TimeoutError("no answer")
    return True
