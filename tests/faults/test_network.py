# SPDX-License-Identifier: Apache-2.0
"""What the network does to a real run: ranks that never meet, callers, resets, partitions."""

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.small_run import LIMIT, Ranks, weights
from tests.launcher import Launcher
from tests.networks import Networks
from tests.sampling import sampled
from training.faults import wire


@pytest.fixture
def ranks(launcher: Launcher) -> Ranks:
    return Ranks(launcher)


@pytest.mark.parametrize("absent", sampled([1, 0], 2))
def test_a_rank_that_never_comes_is_named_in_one_sentence(ranks: Ranks, absent: int) -> None:
    """It is no mistake: the exit code is one after which job scripts try again."""
    result: Any = ranks.run(2, 2, absent=[absent], meeting=1.0)
    other = 1 - absent
    assert result.codes[other] == 1
    (line,) = result.said(other).splitlines()
    assert line.startswith(
        f"pretrain_llama.py: rank {absent} did not connect to MASTER_ADDR:MASTER_P"
    )


def test_a_rank_0_that_dies_at_the_meeting_is_named_in_one_sentence(ranks: Ranks) -> None:
    """Rank 0 keeps the store, and dies while rank 1 waits for rank 2."""
    folder = ranks.start(3, 1, absent=[2], meeting=20.0)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", ranks.launcher.port), timeout=1).close()
            break
        time.sleep(0.02)
    store = dist.TCPStore("127.0.0.1", ranks.launcher.port, is_master=False)
    store.wait(["weft/hello/1"], timedelta(seconds=30))
    os.kill(int((folder / "pid.0").read_text()), signal.SIGKILL)
    result: Any = ranks.launcher.wait()
    assert result.codes[:2] == [-signal.SIGKILL, 1]
    (line,) = result.said(1).splitlines()
    assert line.startswith("pretrain_llama.py: rank 0's store at MASTER_ADDR:MASTER_PORT (127.0.")
    assert result.ended[1] - result.ended[0] < 5


@pytest.fixture
def networks() -> Iterator[Callable[[int], Networks]]:
    made: list[Networks] = []

    def make(count: int) -> Networks:
        made.append(Networks(count))
        return made[-1]

    yield make
    for each in made:
        each.close()


def start_apart(ranks: Ranks, hosts: Networks, flags: str = "") -> Any:
    """Start one data-parallel rank a host, without an end; return the folder once they train."""
    count = len(hosts.names)
    flags += " --no-shared-memory --train-iters 1000000 --eval-interval 1000000"
    folder = ranks.start(
        count,
        1,
        flags=f"{flags} --save-interval 1000000",
        netns=[f"/run/netns/{name}" for name in hosts.names],
        env=hosts.env(),
        monitor={"silence": 4.0, "grace": 0.5, "unwind": 0.5},
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (folder / "log.jsonl").exists():
        time.sleep(0.05)
    assert (folder / "log.jsonl").exists(), (folder / "err.0").read_text()
    time.sleep(1.0)
    return folder


@pytest.mark.prove
def test_a_host_that_is_cut_off_is_told_by_both_sides(
    ranks: Ranks, networks: Callable[[int], Networks]
) -> None:
    hosts = networks(2)
    start_apart(ranks, hosts)
    hosts.cut_off(1)
    cut = time.monotonic()
    result = ranks.launcher.wait()
    assert time.monotonic() - cut < 4.0 + LIMIT / 3 and result.codes == [1, 1]
    for rank in (0, 1):
        (line,) = result.said(rank).splitlines()
        assert line.startswith(f"[rank {rank}] stopping ")
        assert "rank 0 and rank 1 lost contact" in line


@pytest.mark.prove
def test_a_dead_link_between_two_ranks_that_rank_0_hears_is_told_by_all(
    ranks: Ranks, networks: Callable[[int], Networks]
) -> None:
    hosts = networks(3)
    start_apart(ranks, hosts)
    hosts.cut_between(1, 2)
    cut = time.monotonic()
    result = ranks.launcher.wait()
    assert time.monotonic() - cut < 4.0 + LIMIT / 2 and result.codes == [1, 1, 1]
    for rank in range(3):
        last = result.said(rank).splitlines()[-1]
        assert "rank 1 and rank 2 lost contact" in last or "rank 2 and rank 1 lost" in last


@pytest.mark.prove
def test_after_a_reset_all_ranks_tell_one_story(
    ranks: Ranks, networks: Callable[[int], Networks]
) -> None:
    """Every connection between two hosts is reset; both processes live. The data are lost."""
    hosts = networks(2)
    start_apart(ranks, hosts)
    hosts.reset(1)
    cut = time.monotonic()
    result = ranks.launcher.wait()
    assert time.monotonic() - cut < LIMIT / 3 and result.codes == [1, 1]
    stories = {result.said(rank).splitlines()[-1].split(": rank ", 1)[1] for rank in (0, 1)}
    (story,) = stories
    assert " failed first" in story and "; rank 0 and rank 1 lost contact (a con" in story


LONG = "--train-iters 400 --save-interval 400 --eval-interval 400"
SECRET = {"WEFT_SECRET": "known to the ranks of this run"}


@pytest.mark.prove
def test_strangers_change_no_bit_of_a_run(ranks: Ranks) -> None:
    """Garbage, 2,000 connections, forged deaths and fake ranks, all the time, at nofile 1,024.

    The caller reads torch's store, which nobody guards, and so knows all but the secret.
    """
    undisturbed = ranks.run(2, 2, flags=LONG, env=SECRET)
    assert undisturbed.codes == [0, 0]
    ranks.start(2, 2, flags=LONG, env=SECRET, descriptors=1024)
    store = dist.TCPStore("127.0.0.1", ranks.launcher.port, is_master=False)
    store.set_timeout(timedelta(seconds=60))
    nonce = store.get("weft/hello/1").decode().split()[0]
    name = store.get(f"weft/answer/{nonce}").decode()
    address, port, salt = store.get(f"weft/{name}/monitor").decode().split(",")
    where, held, counts = (address, int(port)), [], dict.fromkeys(("held", "noise", "fake"), 0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(4096, before[0]), before[1]))
    key = wire.secret_of(b"", salt)
    text = b'{"kind": "failed", "action": "the update", "why": "dead", "wait": 0}'
    forged = wire.HEAD.pack(len(text)) + text
    noises = [b"[" * 30_000, b"\0" * 500, forged, b'{"rank": 1, "failed": "x", "wait": 0}\n']
    with suppress(ConnectionRefusedError):  # until the run is done
        while True:
            for noise in noises:
                with suppress(ConnectionResetError, BrokenPipeError, TimeoutError):
                    with socket.create_connection(where, timeout=0.5) as caller:
                        caller.sendall(noise)
                        counts["noise"] += 1
            for rank in (0, 1):
                with suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
                    try:
                        wire.join(where, key, rank, "a session", 0.5)
                        raise AssertionError("a fake rank was let in")
                    except ConnectionRefusedError:
                        raise
                    except ConnectionError:
                        counts["fake"] += 1
            for _ in range(200):
                if counts["held"] < 2000:
                    with suppress(TimeoutError, ConnectionResetError):
                        held.append(socket.create_connection(where, timeout=0.5))
                        counts["held"] += 1
    disturbed = ranks.launcher.wait()
    for sock in held:
        sock.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert disturbed.codes == [0, 0], disturbed.said(0) + disturbed.said(1)
    assert counts["held"] == 2000 and counts["noise"] > 20 and counts["fake"] > 5, counts
    assert disturbed.said(0) == undisturbed.said(0) and disturbed.said(1) == undisturbed.said(1)
    assert disturbed.losses() == undisturbed.losses()
    assert weights(disturbed, 400) == weights(undisturbed, 400)
