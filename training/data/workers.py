# SPDX-License-Identifier: Apache-2.0
"""Threads that prefetch, with a number that is adapted to the measured read times.

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
MOST = 32  # threads of a rank, if their number is measured
FIRST, SPARE, WINDOW = 2, 1.5, 9  # first threads; factor on the need; reads in a median


class Workers(Generic[T]):
    """Run `work(start)` in `threads` threads, one start after another; `grow` adds threads."""

    def __init__(self, work: Callable[[int], T], threads: int) -> None:
        self._threads: list[threading.Thread] = []
        self._work = work
        self._jobs: SimpleQueue[tuple[int, Future[T]] | None] = SimpleQueue()
        self._seconds: deque[float] = deque(maxlen=WINDOW)  # of the last calls of work
        self.grow(threads)

    def grow(self, threads: int) -> None:
        """Start threads until there are at least `threads`."""
        for _ in range(threads - len(self._threads)):
            thread = threading.Thread(target=self._loop, name="weft-loader", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def seconds(self) -> float:
        """Return the median duration of the last few calls of work, 0 before the first."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def submit(self, start: int) -> Future[T]:
        """Return the future of work(start)."""
        future: Future[T] = Future()
        self._jobs.put((start, future))
        return future

    def close(self) -> None:
        """End the threads after the submitted starts that are not cancelled."""
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
    """Return how many threads finish `reads` reads within a step, FIRST to MOST.

    read_seconds: the duration of one read. The need is multiplied by SPARE, as reads are uneven.
    """
    if step_seconds <= 0:
        return MOST
    return max(FIRST, min(MOST, math.ceil(SPARE * read_seconds * reads / step_seconds)))
