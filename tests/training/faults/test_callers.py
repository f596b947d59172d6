# SPDX-License-Identifier: Apache-2.0
"""Callers at the failure channel's port that are no ranks: what they send changes nothing."""

import os
import re
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mpu.comm.transport import CommunicationError
from mpu.launch import run_secret
from tests.training.faults.test_monitor import PATIENCE, Staying, wait_until
from training.faults import coordinator, messages, wire
from training.faults import monitor as failure_monitor
from training.faults.address import is_loopback, listen, resolve
from training.faults.coordinator import Cause

SECRET = b"a secret of sixteen bytes or more"


class Two:
    """Two ranks' ends of one channel."""

    def __init__(self, secret: bytes = SECRET, **settings: Any) -> None:
        self.store = dist.HashStore()
        options = {"grace": 0.3, "beat": 0.05, "unwind": 0.1} | settings
        args = (2, self.store, "127.0.0.1", secret)
        self.monitors = [Staying(rank, *args, **options) for rank in range(2)]
        self.hub = self.monitors[0]._coordinator
        self.port = self.hub.port

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def key(self) -> str:
        return wire.secret_of(SECRET, self.store.get("monitor").decode().split(",")[2])

    def check(self) -> None:
        """Nothing has been decided, and a real failure still reaches all."""
        assert self.hub.is_alive() and self.hub.decided is None
        assert [m.first for m in self.monitors] == [None, None]
        self.monitors[1]._notified.set()  # do not wait for the others' cause
        error = KeyError("the real one")
        self.monitors[1].__exit__(KeyError, error, None)
        wait_until(lambda: all(m.first is not None for m in self.monitors))
        assert self.monitors[0].first == Cause(1, "start-up", "KeyError: 'the real one'")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_monitor, "JOINING", 0.5)


@pytest.fixture
def two() -> Iterator[Two]:
    pair = Two()
    yield pair
    for monitor in pair.monitors:
        monitor._left = monitor._printed = True
        monitor._connection.close()


HELLO = b'{"rank": 1, "session": "", "secret": "guessed"}'
GARBAGE = {
    "nothing": b"",
    "deep JSON": b"[" * 30_000,
    "zeros": b"\0" * 100_000,
    "a line without end": b"x" * 1_000_000,
    "an old message": b'{"rank": 1, "token": "guessed", "failed": "ha", "wait": 0}\n',
    "a hello with another secret": wire.HEAD.pack(len(HELLO)) + HELLO,
    "a frame without an object": wire.HEAD.pack(3) + b"[1]",
    "a number that is too long": wire.HEAD.pack(900) + b"9" * 900,
    "text that is none": wire.HEAD.pack(2) + b"\xff\xfe",
    "a secret that no text has": wire.HEAD.pack(20) + b'{"secret": "\\ud800"}',
}


@pytest.mark.parametrize("noise", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_sent_away(two: Two, noise: bytes) -> None:
    with two.connect() as caller:
        try:
            caller.sendall(noise)
            if noise:
                while caller.recv(4096):
                    pass
        except ConnectionError:
            pass  # sent away while it talks
    two.check()


def test_no_descriptors_left(two: Two) -> None:
    """accept() fails; the ranks that have joined hear each other all the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    callers = [two.connect() for _ in range(3)]
    wait_until(lambda: len(two.hub.callers) == 3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    held = []
    try:
        waiting = threading.Thread(target=two.check)
        while True:
            try:
                held.append(os.dup(0))
            except OSError:
                break
        waiting.start()
        waiting.join(PATIENCE)
        assert not waiting.is_alive() and two.hub.decided is not None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
        for caller in callers:
            caller.close()


def test_a_stranger_who_waits_is_sent_away(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "PATIENCE", 0.2)
    with two.connect() as caller:
        caller.sendall(b"half a hello")
        while caller.recv(4096):
            pass
    two.check()


@pytest.mark.parametrize("rank", [0, 1, 2, 99_999_999])
def test_a_fake_rank_with_another_secret_is_sent_away(two: Two, rank: int) -> None:
    address = ("127.0.0.1", two.port)
    with pytest.raises(wire.Refused, match="the secret is not rank 0's"):
        wire.join(address, "guessed", rank, "a session", PATIENCE)
    two.check()


def test_a_second_process_of_a_rank_is_refused(two: Two) -> None:
    with pytest.raises(
        CommunicationError, match="another process, at 127.0.0.1, has already joined as rank 1"
    ):
        Staying(1, 2, two.store, "127.0.0.1", SECRET)
    two.check()


def test_a_rank_beyond_the_world_is_refused(two: Two) -> None:
    with pytest.raises(CommunicationError, match="rank 2 is not one of this run's ranks, 0 to 1"):
        Staying(2, 3, two.store, "127.0.0.1", SECRET)
    two.check()


def test_a_rank_with_another_secret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "JOIN", 0.5)
    store = dist.HashStore()
    first = Staying(0, 2, store, "127.0.0.1", SECRET, beat=0.05, unwind=0.1)
    with pytest.raises(CommunicationError, match="all ranks of a run need the same WEFT_SECRET"):
        Staying(1, 2, store, "127.0.0.1", SECRET + b"!")
    wait_until(lambda: first.first is not None)
    assert first.first.rank == 1 and "rank 1 did not join the failure channel" in first.first.why
    first._left = first._printed = True
    first._connection.close()


def test_a_peer_that_does_not_read_holds_up_nobody(two: Two) -> None:
    """A stopped rank's buffers fill; what the hub has for it waits, and the others are served."""
    wait_until(lambda: len(two.hub.members) == 2)  # a hub answers before it notes who came
    member = two.hub.members[1]
    with member.connection._lock:
        member.connection._out = bytearray(b"x" * 100)  # as if the socket had taken no more
    two.monitors[1]._connection.read = lambda: []
    for _ in range(1000):
        messages.send(member.connection, "report", text="y" * 2000)
    assert member.connection.waiting() <= messages.QUEUE + 4096
    heard = two.hub.members[0].last
    wait_until(lambda: two.hub.members[0].last > heard)


def test_the_secret_is_not_in_the_store(two: Two) -> None:
    said = two.store.get("monitor")
    assert SECRET not in said and SECRET.hex().encode() not in said
    salt = said.decode().split(",")[2]
    assert wire.secret_of(b"", salt) != two.key()


def test_text_from_the_wire_is_safe_to_print() -> None:
    raw = {"kind": "beat", "action": "\x1b[2J\n" + "y" * 5000}  # who knows the secret may be broken
    kind, fields = messages.checked(raw)
    assert kind == "beat" and fields["action"].startswith("\\x1b[2J\\nyyy")
    assert len(fields["action"]) < wire.PRINTED + 10


FAILED = {"kind": "failed", "action": "a", "why": "b", "wait": 0.5}


@pytest.mark.parametrize(
    "said",
    [{}, {"kind": "beat"}, {"kind": "beat", "action": "a", "more": 1}, {"kind": "nonsense"}]
    + [{"kind": 1}, {"kind": "beat", "action": 1}, {"kind": "__class__", "x": ""}]
    + [FAILED | {"wait": x} for x in (1e10, float("nan"), float("inf"), "1", True, None, [1])]
    + [{"kind": "cause", "rank": 1.5, "action": "a", "why": "b", "quick": 1, "address": "c"}],
)
def test_what_is_no_message_is_a_value_error(said: dict[str, Any]) -> None:
    assert messages.checked(dict(FAILED)).fields["wait"] == 0.5
    with pytest.raises(ValueError):
        messages.checked(said)


def test_a_hub_whose_thread_breaks_is_noticed_at_once(two: Two, monkeypatch: Any) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    two.hub._examine = lambda now: 1 / 0
    wait_until(lambda: two.monitors[1].first is not None)
    assert two.monitors[1].first.why == "the process died (killed?)"


def test_where_a_hub_listens() -> None:
    assert is_loopback("localhost") and is_loopback("127.0.1.1") and is_loopback("::1")
    assert not is_loopback("10.0.0.1") and not is_loopback("node1")
    assert is_loopback(resolve("localhost"))
    for address, at in (("127.0.0.1", "127.0.0.1"), ("192.0.2.1", "")):  # no address of this host
        server, listens = listen(address, 0, 5)
        with server:
            assert listens == at and server.getsockname()[0] == (at or "0.0.0.0")
            if at:
                with pytest.raises(OSError, match="in use"):
                    listen(at, server.getsockname()[1], 5)


def test_where_the_runs_secret_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert run_secret(None, None) == b""
    assert run_secret(None, str(file)) == run_secret(SECRET.decode(), None) == SECRET


def wrong(text: str | None, path: str | None, says: str) -> Any:
    return pytest.param(text, path, says, id=says)


@pytest.mark.parametrize(
    "text, path, says",
    [
        wrong("", None, "WEFT_SECRET has 0 bytes: it must have 16 to 4096"),
        wrong("short", None, "WEFT_SECRET has 5 bytes"),
        wrong("x" * 16, "{}/open", "are both set"),
        wrong(None, "{}/open", "may be read or written by other users"),
        wrong(None, "{}/fifo", "is not a file"),
        wrong(None, "{}", "is not a file"),
    ],
)
def test_a_secret_that_is_none_is_refused(
    tmp_path: Path, text: str | None, path: str | None, says: str
) -> None:
    (tmp_path / "open").write_bytes(SECRET)
    (tmp_path / "open").chmod(0o640)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ValueError, match=re.escape(says)):
        run_secret(text, path and path.format(tmp_path))
