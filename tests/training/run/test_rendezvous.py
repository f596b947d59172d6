# SPDX-License-Identifier: Apache-2.0
"""Ranks meet, in the first start or a later one, or say in time who did not come."""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from mpu.launch import Launch, Rendezvous
from tests.sampling import sampled
from training.faults import activity as slow_start
from training.faults.activity import Activity
from training.faults.store import late_ranks, place_of
from training.run import process, rendezvous
from training.run.rendezvous import RendezvousError, meet
from training.settings.config import UsageError

MARGIN = 0.3  # seconds, in place of the program's
LIMIT = 20.0  # seconds, for what takes much less
SOON = timedelta(seconds=0.3)
LONG = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MARGIN", MARGIN)


class Start:
    """Ranks that start together: threads of this process."""

    def __init__(self, point: Rendezvous, world: int) -> None:
        self.point, self.world = point, world

    def launch(self, rank: int, attempt: int = 0) -> Launch:
        here = (rank, self.world)
        return Launch(*here, *here, attempt=attempt, point=self.point)

    def run(
        self, calls: dict[int, Callable[[Launch], Any]], attempts: dict[int, int] | None = None
    ) -> dict[int, Any]:
        """Return what each rank's call returns or raises."""
        results: dict[int, Any] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = calls[rank](self.launch(rank, (attempts or {}).get(rank, 0)))
            except (RuntimeError, ValueError) as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert results.keys() == calls.keys(), "a rank hangs"
        return results


@pytest.fixture
def start(free_port: Callable[[], int]) -> Callable[[int], Start]:
    """start(world) -> ranks of which rank 0 keeps the store."""
    return lambda world: Start(Rendezvous("127.0.0.1", free_port()), world)


@pytest.fixture
def agent(free_port: Callable[[], int]) -> Iterator[Callable[[int], Start]]:
    """agent(world) -> ranks under a torchrun that keeps one store over all starts."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    yield lambda world: Start(Rendezvous("127.0.0.1", port, agent=True), world)
    del store


def coming(launch: Launch) -> dist.Store:
    return meet(LONG, launch)


def impatient(launch: Launch) -> dist.Store:
    return meet(SOON, launch)


def test_ranks_meet_and_share_a_store(start):
    stores = start(3).run(dict.fromkeys(range(3), coming))
    stores[1].set("a", "b")
    assert stores[2].get("a") == stores[0].get("a") == b"b"


def test_the_store_of_a_local_run_is_not_open_to_the_network(start):
    from pathlib import Path

    two = start(2)
    stores = two.run(dict.fromkeys(range(2), coming))
    hexed = f":{two.point.port:04X} "
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()
        if hexed in line and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F:{two.point.port:04X}"] and stores


def test_who_did_not_come_is_named_to_all_who_did(start):
    results = start(4).run({0: impatient, 2: impatient})
    for error in results.values():
        assert isinstance(error, RendezvousError) and error.reported
        assert str(error).startswith(
            "ranks 1 and 3 did not connect to MASTER_ADDR:MASTER_PORT (127.0"
        )


def slow(point: Rendezvous, told: list[str], rank: int) -> Activity:
    return Activity(Launch(rank, 4, rank, 4, point=point), told.append)


def test_who_is_late_is_told_before_the_time_is_over(start, free_port, monkeypatch):
    """Rank 1 looks for rank 0 at another port; ranks 2 and 3 do not come."""
    monkeypatch.setattr(slow_start, "FIRST", 0.2)
    four, told, astray = start(4), list[str](), list[str]()
    wrong = Rendezvous("127.0.0.1", free_port())
    limit = timedelta(seconds=1.8)

    def rank_1(launch: Launch) -> dist.Store:
        launch = replace(launch, point=wrong)
        return meet(limit, launch, activity=slow(wrong, astray, 1))

    rank_0 = lambda launch: meet(limit, launch, activity=slow(four.point, told, 0))  # noqa: E731
    results = four.run({0: rank_0, 1: rank_1})
    where = f"MASTER_ADDR:MASTER_PORT (127.0.0.1:{four.point.port})"
    assert told[0].startswith("[rank 0] waiting for ranks 1 to 3 (on ")
    assert told[0].endswith(f") to connect to {where}: waited 0 s of 2 s") and len(told) < 5
    assert str(results[0]).startswith(f"ranks 1 to 3 did not connect to {where} in ")
    where = f"MASTER_ADDR:MASTER_PORT (127.0.0.1:{wrong.port})"
    assert astray[0].startswith(f"[rank 1] waiting for rank 0 to connect to {where}: ")
    assert not [line for line in (*told, *astray) if "connected" in line]
    assert str(results[1]).startswith(f"rank 0 did not connect to {where}")


def test_other_settings_are_named_to_all(start):
    """Of the first rank that has others, which alone sends all of them."""
    settings = {0: '{"lr": 1}', 1: '{"lr": 1}', 2: '{"lr": 2}', 3: '{"lr": 3}'}
    comes = lambda launch: meet(LONG, launch, settings=settings[launch.rank])  # noqa: E731
    results = start(4).run(dict.fromkeys(range(4), comes))
    text = "--lr is 1 on rank 0 and 2 on rank 2: all ranks need the same value"
    for error in results.values():
        assert not isinstance(error, RendezvousError) and str(error) == text


def test_a_rank_that_ends_where_it_is_asked_for_its_settings(start, monkeypatch):
    monkeypatch.setattr(rendezvous, "ASKED", 0.5)

    def ends(launch: Launch) -> None:
        store = dist.TCPStore("127.0.0.1", launch.point.port, 3, False, LONG, False)
        store.set("weft/hello/2", "nonce 0 ")
        store.add("weft/calls", 1)
        names = dist.PrefixStore(f"weft/{store.get('weft/answer/nonce').decode()}", store)
        names.set("here/2", place_of(launch, "another digest"))
        store.add("weft/calls", 1)

    results = start(3).run({0: coming, 1: coming, 2: ends})
    for rank in (0, 1):
        assert isinstance(results[rank], RendezvousError) and results[rank].reported
        assert str(results[rank]) == "rank 2 connected and then ended"


class Kept(dict):
    """A store of 64 ranks, 8 on a node: what late_ranks asks for, and how often."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return keys[0] in self


def test_late_ranks_are_named_with_their_nodes_where_these_are_known():
    launch = Launch(0, 64, 0, 8)
    store = Kept({f"here/{r}": f'["n{r // 8}", {70 + r}, {r % 8}, 8]'.encode() for r in range(20)})
    assert late_ranks([3], store, launch) == "rank 3 (process 73 on n0)"
    assert late_ranks([20, 22, 23], store, launch) == "ranks 20, 22 and 23 (on n2)"
    assert late_ranks([17, *range(24, 32)], store, launch) == (
        "rank 17 (process 87 on n2), ranks 24 to 31 (node 3, counted from 0)"
    )
    asked, store.asked = store.asked, 0
    assert late_ranks(range(1, 64), store, launch).endswith(" and 32 more")
    assert store.asked <= 32 and asked
    cyclic = Kept({"here/16": b'["n0", 70, 2, 8]', "here/18": b'["n2", 71, 2, 8]'})
    assert late_ranks([17, 19], cyclic, launch) == "ranks 17 and 19"
    assert late_ranks([9], Kept({"here/8": b""}), launch) == "rank 9 (node 1, counted from 0)"


def test_a_rank_0_that_never_came_is_named(start):
    error = start(2).run({1: impatient})[1]
    assert isinstance(error, RendezvousError) and not error.reported
    assert str(error).startswith("rank 0 did not connect to MASTER_ADDR:MASTER_PORT (127.0.0.1:")


@pytest.mark.prove
def test_an_agents_store_without_rank_0_is_left_in_time(agent):
    error = agent(2).run({1: impatient})[1]
    assert isinstance(error, RendezvousError) and "rank 0 did not connect" in str(error)


@pytest.mark.parametrize("says", sampled([b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], 2))
def test_a_port_that_somebody_else_holds_keeps_no_rank(says, free_port):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = []

        def serve() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                    taken[-1].sendall(says)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        start = Start(Rendezvous("127.0.0.1", server.getsockname()[1]), 2)
        error = start.run({1: impatient})[1]
        assert isinstance(error, RendezvousError) and "store" in str(error)
        assert len(str(error).splitlines()) == 1
        error = start.run({0: impatient})[0]
        assert isinstance(error, RendezvousError) and "rank 0 cannot listen at MASTER" in str(error)
        server.shutdown(socket.SHUT_RDWR)
        for connection in taken:
            connection.close()
    for thread in threading.enumerate():  # that torch let go by now: what it prints is this test's
        if thread.name == "meeting":
            thread.join(LIMIT)
            assert not thread.is_alive()


def test_a_store_that_ends_as_it_is_found_is_looked_for_again(free_port):
    """A listener ends between two attempts; then rank 0 comes, at the same port."""
    port, results = free_port(), {}
    start = Start(Rendezvous("127.0.0.1", port), 2)
    server = socket.create_server(("127.0.0.1", port))

    def other() -> None:
        results.update(start.run({1: coming}))

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    server.accept()[0].close()  # the look whether anybody listens
    server.close()
    results.update(start.run({0: coming}))
    thread.join(LIMIT)
    results[0].set("a", "b")
    assert results[1].get("a") == b"b" and results[1].timeout == LONG


def test_what_one_rank_refuses_all_hear(start):
    refusing = lambda launch: meet(LONG, launch, "--lr -1: \x1b[31m")  # noqa: E731
    results = start(3).run({0: coming, 1: refusing, 2: coming})
    assert {str(error) for error in results.values()} == {"rank 1: --lr -1: \\x1b[31m"}
    assert not any(isinstance(error, RendezvousError) for error in results.values())


def test_rank_0_refuses(start):
    refusing = lambda launch: meet(LONG, launch, "no")  # noqa: E731
    results = start(2).run({0: refusing, 1: coming})
    assert [str(results[r]) for r in (0, 1)] == ["rank 0: no"] * 2


@pytest.mark.prove
def test_a_later_start_knows_nothing_of_an_earlier_one(agent):
    """What stands in the store is old: hellos, a refusal, answers, settings that were compared."""
    three = agent(3)
    refusing = lambda launch: meet(SOON, launch, "an old mistake")  # noqa: E731
    assert isinstance(three.run({1: refusing})[1], RendezvousError)  # nobody heard it

    def of_the_second(launch: Launch) -> None:
        meet(LONG, launch, settings='{"lr": 1}')

    def of_the_third(launch: Launch) -> None:
        meet(LONG, launch, settings='{"lr": 2}' if launch.rank == 2 else '{"lr": 1}')

    second = three.run(dict.fromkeys(range(3), of_the_second), dict.fromkeys(range(3), 1))
    assert set(second.values()) == {None}
    third = three.run(dict.fromkeys(range(3), of_the_third), dict.fromkeys(range(3), 2))
    for error in third.values():
        assert isinstance(error, UsageError) and "lr is 1 on rank 0 and 2 on rank 2" in str(error)


@pytest.mark.prove
def test_a_rank_that_said_hello_and_died_did_not_come(agent):
    two = agent(2)
    assert isinstance(two.run({1: impatient})[1], RendezvousError)  # its hello stays
    error = two.run({0: impatient})[0]
    assert str(error).startswith("rank 1 did not connect")


@pytest.mark.parametrize("port, why", [("70000", "MASTER_PORT is 70000: it"), ("x", "is 'x'")])
def test_where_no_rank_can_meet_one_that_refuses_ends_at_once(
    port: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would listen at another port, or at none, and wait for ranks that cannot come."""
    monkeypatch.setattr(process, "meet", lambda *given, **more: pytest.fail("it waits"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", port)
    launch = Launch.from_env()
    with pytest.raises(ValueError) as refused:
        launch.check_rendezvous()
    assert process.refuse(refused.value, launch, 2, None, alone=True) == 2
    assert why in capsys.readouterr().err
