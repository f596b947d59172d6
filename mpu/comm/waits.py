# SPDX-License-Identifier: Apache-2.0
"""Record what a rank waits for, how long it has waited on each axis, and its progress on each.

Every blocking wait of the transports passes through `blocked` (mpu/comm/transport.py), at the cost
of two clock readings. From this training/faults/hang_watch.py finds which rank waits for which, and
training/run/watch/slow_ranks.py which rank is slow: the one for which the others wait. On NCCL a
wait blocks the stream, not the host, so it is not counted.
"""

import threading
import time
from typing import Any, NamedTuple


class Wait(NamedTuple):
    """One wait of a rank.

    verb: "all_gather", "receive", ... axis: its name. peers: the global ranks waited for; for a
    collective they include this rank. number: the count of collectives that this rank has started
    on the axis, this one included; 0 for a message.
    """

    verb: str
    axis: str
    peers: tuple[int, ...]
    number: int

    def pack(self) -> list[Any]:
        """Return it for JSON, short at any world size: peers that are evenly spaced, or such rows
        of them at an even distance, and so on, are two numbers for each such level.
        """
        levels, peers = list[list[int]](), list(self.peers)
        while len(peers) > 1:
            step = peers[1] - peers[0]
            count = next((n for n in range(2, len(peers)) if peers[n] - peers[n - 1] != step), 0)
            count = count or len(peers)
            levels.append([step, count])
            peers = peers[::count]
        return [self.verb, self.axis, self.peers[0], levels, self.number]

    @classmethod
    def packed(cls, values: list[Any]) -> "Wait":
        """Return the wait that `pack` wrote."""
        verb, axis, first, levels, number = values
        peers = [first]
        for step, count in levels:
            peers = [peer + step * i for i in range(count) for peer in peers]
        return cls(verb, axis, tuple(peers), number)


MESSAGES = ("send", "receive")


class Waits:
    """The waits of one thread: the one that made this object, or called `follow` last. Waits of
    other threads are not counted.

    seconds: {axis: total seconds blocked}. started: {axis: total collectives started}. now: the
    current wait. last: the collective started last. moved: time.monotonic() at the end of the last
    wait. Axis.start and `blocked` of mpu/comm/transport.py fill them in.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.seconds: dict[str, float] = {}
        self.started: dict[str, int] = {}
        self.now: Wait | None = None
        self.moved = time.monotonic()
        self.last: Wait | None = None

    def follow(self) -> None:
        """Count the waits of the calling thread from now on."""
        self.thread = threading.get_ident()

    def of(self, axis: str, ranks: tuple[int, ...], what: str) -> Wait:
        """Return the wait for memory that `ranks` share: mostly for the collective started last."""
        if self.last is not None and self.last.peers == ranks:
            return self.last
        return Wait(what, axis, ranks, self.started.get(axis, 0))
