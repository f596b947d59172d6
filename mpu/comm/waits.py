# SPDX-License-Identifier: Apache-2.0
"""Keep what a rank waits for, for how long it waited on each axis, and how far it is on each.

Every blocking wait of the transports passes through `begin` and `end`: two readings of the clock.
It tells mpu/comm/hang_watch.py who waits for whom, and training/run/slow_ranks.py which rank is
slow: the one that the others wait for. On NCCL a wait blocks the stream, not the host, and counts
as none.
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
    def packed(cls, said: list[Any]) -> "Wait":
        """Return the wait that `pack` wrote."""
        verb, axis, first, step, count, number = said
        return cls(verb, axis, tuple(first + step * i for i in range(count)), number)


MESSAGES = ("send", "receive")


class Waits:
    """The waits of the thread that made this object; those of other threads are not counted.

    seconds: {axis: seconds blocked}, growing. started: {axis: collectives started}, growing. now:
    what it waits for at this moment. moved: time.monotonic() at the end of the last wait.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.seconds: dict[str, float] = {}
        self.started: dict[str, int] = {}
        self.now: Wait | None = None
        self.moved = self._since = time.monotonic()
        self._last: Wait | None = None

    def start(self, verb: str, axis: str, ranks: tuple[int, ...], peer: int | None) -> Wait:
        """Count a collective or message that starts; return what a wait for it is. peer: of a
        message, the other end's rank in the world.
        """
        if verb in MESSAGES:
            return Wait(verb, axis, ranks if peer is None else (peer,), 0)
        number = self.started[axis] = self.started.get(axis, 0) + 1
        self._last = Wait(verb, axis, ranks, number)
        return self._last

    def of(self, axis: str, ranks: tuple[int, ...], what: str) -> Wait:
        """Return the wait of memory that `ranks` share: mostly for the collective begun last."""
        if self._last is not None and self._last.peers == ranks:
            return self._last
        return Wait(what, axis, ranks, self.started.get(axis, 0))

    def begin(self, wait: Wait) -> bool:
        """Note that the wait begins; return False where it is another thread's, or inside one."""
        if self.now is not None or threading.get_ident() != self.thread:
            return False
        self.now, self._since = wait, time.monotonic()
        return True

    def end(self) -> None:
        """Note that the wait is over."""
        wait, self.now, self.moved = self.now, None, time.monotonic()
        assert wait is not None, "no wait began"
        self.seconds[wait.axis] = self.seconds.get(wait.axis, 0.0) + self.moved - self._since
