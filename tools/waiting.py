# SPDX-License-Identifier: Apache-2.0
"""Show that a tool is at work where it says nothing for more than some seconds.

The standard library alone, as tools/setup_env.py runs before anything is installed.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AFTER, EVERY = 3.0, 10.0  # seconds to a terminal's line, and between lines that a file keeps


@contextmanager
def waiting(what: str, state: Callable[[], str] = str) -> Iterator[None]:
    """Print to stderr for how many seconds the block has run, and its state.

    On a terminal it is one line that changes each second, from AFTER seconds on, and is cleared at
    the end; elsewhere, a line every EVERY seconds. The block itself should print nothing.
    """
    over, began, live = threading.Event(), time.monotonic(), sys.stderr.isatty()

    def report() -> None:
        wait = AFTER if live else EVERY
        while not over.wait(wait):
            now = state()
            line = f"{what}: {time.monotonic() - began:.0f} s" + f", {now}" * bool(now)
            if live:
                line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
            print(line, end="" if live else "\n", file=sys.stderr, flush=True)
            wait = 1.0 if live else EVERY

    thread = threading.Thread(target=report, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
