# SPDX-License-Identifier: Apache-2.0
"""Show the progress of a tool that prints nothing for more than some seconds, and the time left.

It uses the standard library only, as tools/setup_env.py runs before anything is installed.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from training.run.text import in_units

AFTER, MOST = 5.0, 300.0  # seconds to the first line, and at most between lines in a file
LIVE = 1.0  # seconds between two changes of a terminal's line


class Progress:
    """The progress of a task, in words. Only `waiting` displays it."""

    def __init__(self) -> None:
        self._part, self._total, self._unit, self._done = "", 0, "", 0
        self._began = time.monotonic()

    def begin(self, part: str, total: int = 0, unit: str = "") -> None:
        """Begin a part of the work. total: its length in units (B: bytes), 0 if unknown."""
        self._part, self._total, self._unit, self._done = part, total, unit, 0
        self._began = time.monotonic()

    def add(self, done: int = 1) -> None:
        """Count `done` more units of the part as done."""
        self._done += done

    def __str__(self) -> str:
        """Return the part, how much of it is done, and about how long the rest takes."""
        if not self._total:
            return self._part
        done, total = self._done, self._total
        if self._unit == "B":
            count = f"{in_units(done)} of {in_units(total)}"
        else:
            count = f"{done:,} of {total:,}{self._unit and f' {self._unit}'}"
        passed = time.monotonic() - self._began
        words = f"{self._part}{self._part and ' '}{count}"
        return words + time_left(passed, done, total)


def time_left(passed: float, done: float, total: float) -> str:
    """Return the time left, ", about 20 s left", if `done` of `total` took `passed` seconds."""
    if not 0 < done < total:
        return ""
    return f", about {duration(passed * (total - done) / done)} left"


def duration(seconds: float) -> str:
    """Return a time in words: 90 s, 2 min 5 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@contextmanager
def waiting(what: str, state: Callable[[], str] | None = None) -> Iterator[Progress]:
    """Print to stderr what the block does, for how long, and its progress.

    On a terminal it is one line that changes each second, from AFTER seconds on, and is cleared at
    the end; elsewhere a line after AFTER seconds and whenever the time has doubled since the last
    one. The block itself should print nothing. Yields a Progress that the block may update; state:
    a function that returns the words instead.
    """
    over, began, live = threading.Event(), time.monotonic(), sys.stderr.isatty()
    progress, shown = Progress(), threading.Event()

    def report() -> None:
        wait = AFTER
        while not over.wait(wait):
            now, passed = str(progress) if state is None else state(), time.monotonic() - began
            line = f"{what}: {duration(passed)}" + f", {now}" * bool(now)
            if live:
                line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
            print(line, end="" if live else "\n", file=sys.stderr, flush=True)
            shown.set()
            wait = LIVE if live else min(max(passed, AFTER), MOST)

    thread = threading.Thread(target=report, name="waiting", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        over.set()
        thread.join()
        if live and shown.is_set():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
