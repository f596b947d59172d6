# SPDX-License-Identifier: Apache-2.0
"""The link between a rank and the coordinator breaks, while the processes at both ends live."""

import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from mpu.comm.transport import CommunicationError
from tests.proxy import Proxy
from tests.training.faults.test_monitor import PATIENCE, Staying, wait_until
from training.faults import coordinator, hang_detector, messages
from training.faults import monitor as failure_monitor
from training.faults.links import Links
from training.faults.wire import Connection


class Linked:
    """Three ranks; the link of rank 2 leads through a proxy."""

    def __init__(self, **settings: Any) -> None:
        options = {"grace": 0.3, "beat": 0.05, "unwind": 0.1} | settings
        store = dist.HashStore()
        self.monitors = [Staying(r, 3, store, **options) for r in (0, 1)]
        address, port, salt = store.get("monitor").decode().split(",")
        self.link = Proxy((address, int(port)))
        store.set("monitor", f"{address},{self.link.port},{salt}")
        self.monitors.append(Staying(2, 3, store, **options))
        self.hub = self.monitors[0]._coordinator
        wait_until(lambda: len(self.hub.members) == 3)

    def first(self, rank: int) -> str:
        """Return the first cause, as this rank knows it, once it does."""
        wait_until(lambda: self.monitors[rank].first is not None)
        return str(self.monitors[rank].first)


@pytest.fixture
def linked() -> Iterator[Callable[..., Linked]]:
    made: list[Linked] = []

    def make(**settings: Any) -> Linked:
        made.append(Linked(**settings))
        return made[-1]

    yield make
    for each in made:
        for monitor in each.monitors:
            monitor._left = monitor._printed = True
            monitor._connection.close()
        each.link.over = True


@pytest.mark.prove
def test_a_rank_comes_back_after_resets(linked: Callable[..., Linked], capsys: Any) -> None:
    three = linked()
    for i in range(1, 4):
        three.link.asked = "reset"
        wait_until(lambda n=i: three.link.accepted == 1 + n)
        three.monitors[2].action = f"the action after reset {i}"
        wait_until(lambda: three.hub.members[2].action == three.monitors[2].action)
    assert three.hub.decided is None
    for monitor in reversed(three.monitors):
        monitor.__exit__(None, None, None)
    assert not three.hub.is_alive() and capsys.readouterr().err == ""


def test_a_reset_that_a_send_was_told_is_no_orderly_end() -> None:
    """The kernel tells a reset once: a read after the send that was told finds an end of file."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there = listener.accept()[0]
    connection = Connection(here)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()  # with a reset
    connection.wait(PATIENCE)
    connection.send({})
    connection.read()
    assert connection.ended == "broken"
    here.close()


def test_what_was_said_into_a_broken_link_is_said_again(linked: Callable[..., Linked]) -> None:
    three = linked(silence=60.0)
    three.link.asked = "drop"  # so that the report does not arrive
    time.sleep(0.1)
    three.monitors[2]._notified.set()
    three.monitors[2].__exit__(KeyError, KeyError("lost"), None)
    three.link.asked = "reset"
    assert "rank 2 failed first during start-up: KeyError: 'lost'" in three.first(1)


def test_a_reset_link_that_stays_away_is_told_by_both_its_ends(
    linked: Callable[..., Linked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "RETURN", 0.5)
    monkeypatch.setattr(failure_monitor, "RETURN", 0.5)
    three = linked()
    three.link.asked = "away"
    both = "rank 0 and rank 2 lost contact"
    for rank, blamed in ((0, 2), (1, 2), (2, 0)):
        said = three.first(rank)
        assert said.startswith(f"rank {blamed} failed first") and both in said
        assert "was reset" in said


@pytest.mark.prove
def test_a_silent_link_is_told_by_both_its_ends(
    linked: Callable[..., Linked], monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in (hang_detector, failure_monitor):  # the peer is on another host, out of sight
        monkeypatch.setattr(user, "silence", lambda place, otherwise: otherwise)
    three = linked(silence=1.0)
    three.link.asked = "drop"
    for rank in range(3):
        said = three.first(rank)
        assert "no heartbeat for 1 s: rank 0 and rank 2 lost contact" in said


def test_a_death_behind_the_link_is_a_death_at_once(linked: Callable[..., Linked]) -> None:
    three = linked(silence=60.0)
    three.monitors[2]._left = True
    three.monitors[2]._connection.close()  # as the kernel does for a killed process
    assert "rank 2 failed first: the process died (killed?)" in three.first(1)


def test_the_death_of_rank_0_is_known_at_once_after_a_reset(
    linked: Callable[..., Linked],
) -> None:
    """A killed process whose buffer holds something unread resets its connections."""
    three = linked(silence=60.0)
    three.monitors[2]._address = (three.monitors[2]._address[0], three.hub.port)
    three.hub.close()
    three.link.asked = "reset"
    assert three.first(2) == "rank 0 failed first: the process died (killed?)"


def test_a_dead_link_elsewhere_is_told_with_both_ends(linked: Callable[..., Linked]) -> None:
    """Rank 1's kernel knows it; rank 0 hears both ranks at the link's ends."""
    three = linked()
    for rank in range(3):
        three.hub.members[rank].address = f"10.0.0.{rank}"
    for address in ("10.0.0.9", "10.0.0.2"):  # no rank is at the first
        messages.send(three.monitors[1]._connection, "unheard", address=address, seconds=21.0)
    assert three.first(2) == (
        "rank 1 failed first during start-up: no heartbeat from 10.0.0.2 for 21 s: rank 1 and "
        "rank 2 lost contact (cut off by the network)"
    )


def test_after_a_reset_both_ends_tell_one_story(linked: Callable[..., Linked]) -> None:
    three = linked(grace=0.5)
    text = "all_reduce over dp: Connection reset by peer"
    for monitor in three.monitors[1:]:
        monitor._notified.set()
        error = CommunicationError(text)
        monitor.__exit__(CommunicationError, error, None)
    stories = {three.first(rank) for rank in range(3)}
    assert len(stories) == 1
    assert stories <= {  # whichever report arrives first
        f"rank {rank} failed first during start-up: CommunicationError: {text}; rank 1 and rank 2 "
        "lost contact (a connection broke while all processes were alive)"
        for rank in (1, 2)
    }


def test_what_the_kernel_knows_of_links() -> None:
    """An idle or a busy connection is no dead one, and none of this process's is closed by it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
        near.sendall(b"x" * 100)
        links = Links(0.0)
        assert list(links.dead()) == [] and far.recv(100) == b"x" * 100
        near.close()
        far.close()
