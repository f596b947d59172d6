# SPDX-License-Identifier: Apache-2.0
"""Keep what a rank waits for, for how long it waited on each axis, and how far it is on each.

Every blocking wait of the transports passes through `blocked` (mpu/comm/transport.py): two readings
of the clock. training/faults/hang_watch.py learns from it who waits for whom, and
training/run/watch/slow_ranks.py which rank is slow: the one that the others wait for. On NCCL a
wait blocks the stream, not the host, and counts as none.
"""

import threading
import time
from typing import Any, NamedTuple


class Wait(NamedTuple):
    """One wait of a rank.

    verb: "all_gather", "receive", ... axis: its name. peers: the ranks it needs, in the world's
    numbers, this one among them unless it is a message's. number: how many collectives this rank
    has started on the axis, this one included; 0 for a message.
    """

    verb: str
    axis: str
    peers: tuple[int, ...]
    number: int

    def pack(self) -> list[Any]:
        """Return it for JSON, short for any world: the peers of an axis are evenly spaced."""
        step = self.peers[1] - self.peers[0] if len(self.peers) > 1 else 1
        return [self.verb, self.axis, self.peers[0], step, len(self.peers), self.number]

    @classmethod
    def packed(cls, values: list[Any]) -> "Wait":
        """Return the wait that `pack` wrote."""
        verb, axis, first, step, count, number = values
        return cls(verb, axis, tuple(first + step * i for i in range(count)), number)


MESSAGES = ("send", "receive")


class Waits:
    """The waits of one thread: the one that made this object, or called `follow` last. Those of
    other threads are not counted.

    seconds: {axis: seconds blocked}, growing. started: {axis: collectives started}, growing. now:
    what it waits for at this moment. last: the collective begun last. moved: time.monotonic() at
    the end of the last wait. Axis.start and `blocked` of mpu/comm/transport.py fill them in.
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
        """Return the wait of memory that `ranks` share: mostly for the collective begun last."""
        if self.last is not None and self.last.peers == ranks:
            return self.last
        return Wait(what, axis, ranks, self.started.get(axis, 0))
