# SPDX-License-Identifier: Apache-2.0
"""Wait for keys that other ranks write to the rendezvous store, and print which ranks are late.

    rank r   here/r = its host, process, place on its node, and a digest of its settings
    rank 0   late/WAIT = "", once it has printed that ranks are late in this wait

Rank 0 prints the ranks that it waits for, with their hosts. The others wait for rank 0, and print
so if rank 0 prints nothing. A wait polls one key, or one count; the keys of single ranks are read
only if some are late.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpu.launch import Launch
from training.faults.activity import LATER, Activity
from training.files.untrusted import printable

MOST = 4  # nodes in one line, at most


def place_of(launch: Launch, settings: str) -> str:
    """Return the value of here/RANK: host, process, place on its node and digest of settings."""
    about = [socket.gethostname(), os.getpid(), launch.local_rank, launch.local_world]
    return json.dumps([*about, settings])


def spans(ranks: Sequence[int]) -> str:
    """Return ascending ranks as "rank 3", "ranks 1 and 3", "ranks 0, 2, 8 to 15 and 3 more"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts, left = list[str](), len(ranks)
    for low, high in runs[: 3 if len(runs) > 4 else 4]:
        texts += [f"{low} to {high}"] if high > low + 1 else map(str, range(low, high + 1))
        left -= high - low + 1
    if left:
        texts.append(f"{left} more")
    last = texts.pop()
    text = f"{', '.join(texts)} and {last}" if texts else last
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def late_ranks(ranks: Sequence[int], store: Any, launch: Launch) -> str:
    """Return "rank 3 (process 71 on node0), ranks 8 to 15 (node 1, counted from 0)".

    A node's host is the one that a rank of it has written. Nodes are named only if their ranks are
    consecutive, as most launchers number them. store: of this start.
    """
    size, world = launch.local_world, launch.world
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // size, []).append(rank)
    texts, left = list[str](), len(ranks)
    for node, late in list(nodes.items())[:MOST]:
        hosts, where = set[str](), ""
        for rank in range(node * size, min((node + 1) * size, world)):
            host, process, local_rank = _place(store, rank)
            if host and [rank] == late:
                where = f"process {process} on {host}"
            if host:
                hosts.add(host if size == world or local_rank == rank % size else "")
        if len(hosts) == 1 and "" not in hosts:
            where = where or f"on {hosts.pop()}"
        elif not hosts and size < world:
            where = f"node {node}, counted from 0"
        texts.append(spans(late) + (f" ({where})" if where else ""))
        left -= len(late)
    return ", ".join(texts) + (f" and {left} more" if left else "")


def _place(store: Any, rank: int) -> tuple[str, int, int]:
    """Return a rank's host, process and place on its node, ("", 0, 0) if they are not written."""
    try:
        if store.check([f"here/{rank}"]):
            host, process, local_rank, *_ = json.loads(store.get(f"here/{rank}").decode())
            return printable(str(host), most=99), int(process), int(local_rank)
    except (RuntimeError, ValueError, TypeError):  # of another version of the program
        pass
    return "", 0, 0


def await_key(
    store: Any,
    key: str,
    deadline: float,
    late: Callable[[], Exception],
    *,
    activity: Activity,
    wait: str,
    what: str,
    by: int = 0,
) -> str:
    """Return the value of a key once it is set. Raises late() after the deadline.

    activity: prints that the wait is slow. Rank 0 prints it first; another rank prints it only if
    rank 0 has not, whose mark is late/`wait`, or at once if rank 0 cannot have printed it (wait is
    ""). what: what this rank waits for, in words. by: the rank that sets the key.
    """
    began, told, first = time.monotonic(), False, activity.launch.rank == 0

    def look() -> None:
        nonlocal told
        if wait and not first and not told and time.monotonic() - began > activity.first:
            told = store.check([f"late/{wait}"])

    with activity.waiting(
        f"waiting for rank {by}",
        lambda: f"waiting for {what}",
        limit=deadline - began,
        over=lambda: f"rank {by} answered",
        aloud=lambda: not told,
        on_line=lambda: store.set(f"late/{wait}", "") if first else None,
        after=LATER if wait and not first else 1.0,
    ):
        value = poll(store, key, deadline, look)
        if value is None:
            raise late()
    return value


def poll(
    store: Any, key: str, deadline: float, look: Callable[[], None] = lambda: None
) -> str | None:
    """Return the value of a key once it is set, None after the deadline; call look() meanwhile.

    It polls, since a wait inside of torch's store would block signals.
    """
    pause = 0.005
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        look()
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    return str(store.get(key).decode())
