# SPDX-License-Identifier: Apache-2.0
"""Interleave two computations of a rank: one runs while the other's bytes are in flight.

    forward of micro-batch i + 1    attention, router, rows leave  |          | experts ...
    backward of micro-batch i                                      | combine  |

An exchange of rows between experts is started, then `switch` is called, then it is waited for:
between the two the other micro-batch computes (`--overlap-moe-expert-parallel-comm`). Each has a
Python stack of its own, so the forward runs in a second thread. The two never run at once: one
continues when the other switches or ends. So the order of what a rank launches and sends depends on
the layers alone, and is the same on every rank of a stage.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from mpu.torch_private import active_modes

First = TypeVar("First")
Second = TypeVar("Second")


class Interleaver:
    """Whose turn it is: that of the first computation, which has a thread of its own, or of the
    second. Where only one runs, `switch` does nothing.
    """

    def __init__(self) -> None:
        self._may_run: tuple[threading.Semaphore, threading.Semaphore] | None = None
        self._now = 0
        self._failed = False
        self._resume: Callable[[], None] = lambda: None

    @property
    def two(self) -> bool:
        """Return whether another computation can go on."""
        return self._may_run is not None

    def switch(self) -> None:
        """Let the other computation run until it switches or ends.

        Called by the one that runs, in whichever thread: autograd has threads of its own.
        """
        both = self._may_run  # the other one clears it at its end
        if both is None:
            return
        mine, self._now = self._now, 1 - self._now
        both[1 - mine].release()
        both[mine].acquire()
        self._resume()
        if self._failed:
            raise RuntimeError("the other micro-batch failed")

    def run(
        self,
        first: Callable[[], First],
        second: Callable[[], Second],
        resume: Callable[[], None] = lambda: None,
    ) -> tuple[First, Second]:
        """Return what both return. Raises what the one that fails first raises.

        resume: called in the thread of the one whose turn begins, and at the end in this one.
        """
        assert self._may_run is None, "two run already"
        both = self._may_run = threading.Semaphore(0), threading.Semaphore(0)
        results: list[Any] = [None, None]
        errors: list[BaseException] = []

        def work(which: int, run: Callable[[], Any]) -> None:
            try:
                resume()
                results[which] = run()
            except BaseException as error:
                errors.append(error)
                self._failed = True
            self._may_run = None  # the other is alone
            self._now = 1 - which
            both[1 - which].release()

        def as_here() -> First:
            with inside:
                return first()

        def in_thread() -> None:
            both[0].acquire()
            work(0, as_here)

        self._resume = resume
        self._now, self._failed, inside = 0, False, _as_here()
        thread = threading.Thread(target=in_thread, name="weft-forward", daemon=True)
        thread.start()
        both[0].release()
        both[1].acquire()
        work(1, second)
        thread.join()
        resume()
        self._may_run, self._failed = None, False
        if errors:
            raise errors[0]
        return results[0], results[1]


def _as_here() -> contextlib.AbstractContextManager[Any]:
    """Return what gives another thread this one's stream, and the modes by which tools watch."""
    modes = active_modes()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            for mode in modes:
                stack.enter_context(mode)
            yield

    return inside()
