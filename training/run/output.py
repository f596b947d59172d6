# SPDX-License-Identifier: Apache-2.0
"""Write to standard output so that its end is never the run's.

A disk that is full under a redirected output, a reader that left its pipe and a terminal that is
gone raise OSError. The lines are lost then; what the buffer still holds is written where a later
line finds room.
"""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def say(line: str) -> None:
    """Print a line now, or lose it."""
    with suppress(OSError):
        print(line, flush=True)


def flush() -> None:
    """Write out what is buffered for standard output and error, or lose it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed before the start
            with suppress(OSError):
                stream.flush()


def write_line(file: Any, line: str) -> None:
    """Write a line of the JSON log and hand it to the system."""
    file.write(line + "\n")
    file.flush()


def write_scalars(writer: Any, numbers: dict[str, Any], step: int) -> None:
    """Queue numbers for TensorBoard's thread; raises what that thread failed with."""
    for key, value in numbers.items():
        writer.add_scalar(key, value, step)


def hushed(make: Callable[[], T]) -> T:
    """Return what `make` makes; an error that ends one of its threads prints no traceback.

    TensorBoard raises the error of its thread again at the next write, where `Log` tells it.
    """
    before, hook = set(threading.enumerate()), threading.excepthook
    made = make()
    threads = set(threading.enumerate()) - before

    def tell(error: threading.ExceptHookArgs) -> None:
        if error.thread not in threads:
            hook(error)

    threading.excepthook = tell
    return made
