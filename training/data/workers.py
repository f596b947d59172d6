# SPDX-License-Identifier: Apache-2.0
"""Threads that read ahead, as many as the reads turn out to need.

They are daemons: one that hangs in a read does not keep the process from ending.
"""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
MOST = 32  # threads of a rank, where their number is left to measurement
FIRST, SPARE, WINDOW = 2, 1.5, 9  # threads at first; times what the means ask for; of so many reads


class Workers(Generic[T]):
    """Run `work(start)` in `threads` threads, one start after another; `grow` adds threads."""

    def __init__(self, work: Callable[[int], T], threads: int) -> None:
        self._threads: list[threading.Thread] = []
        self._work = work
        self._jobs: SimpleQueue[tuple[int, Future[T]] | None] = SimpleQueue()
        self._seconds: deque[float] = deque(maxlen=WINDOW)  # that a start takes
        self.grow(threads)

    def grow(self, threads: int) -> None:
        """Have at least this many threads."""
        for _ in range(threads - len(self._threads)):
            thread = threading.Thread(target=self._loop, name="weft-loader", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def seconds(self) -> float:
        """Return how long a start takes, the median of the last few, 0 before the first."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def submit(self, start: int) -> Future[T]:
        """Return the result of work(start), which is to come."""
        future: Future[T] = Future()
        self._jobs.put((start, future))
        return future

    def close(self) -> None:
        """End the threads once they have done what was submitted and not cancelled."""
        for _ in self._threads:
            self._jobs.put(None)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            start, future = job
            if not future.set_running_or_notify_cancel():
                continue
            begin = time.perf_counter()
            try:
                found = self._work(start)
            except BaseException as error:
                future.set_exception(error)
            else:
                self._seconds.append(time.perf_counter() - begin)
                future.set_result(found)


def wanted_workers(read_seconds: float, reads: int, step_seconds: float) -> int:
    """Return how many threads finish `reads` of so many seconds each within a step, FIRST to MOST.

    SPARE times as many, since reads are uneven.
    """
    if step_seconds <= 0:
        return MOST
    return max(FIRST, min(MOST, math.ceil(SPARE * read_seconds * reads / step_seconds)))
