# SPDX-License-Identifier: Apache-2.0
"""Interleave two computations of a rank: one runs while the other's bytes are in flight.

    forward of micro-batch i + 1    attention, router, rows leave  |          | experts ...
    backward of micro-batch i                                      | combine  |

An exchange of rows between experts is started, then `switch` is called, then it is waited for:
between the two the other micro-batch computes (`--overlap-moe-expert-parallel-comm`). Each has a
Python stack of its own, so the backward runs in a second thread, which is the same one for all
pairs. The two never run at once: one continues when the other switches or ends. So the order of
what a rank launches and sends depends on the layers alone, and is the same on every rank of a
stage.

Every forward of a rank, interleaved or not, runs in the thread that called the engine, and every
backward on a GPU runs in autograd's thread of that GPU, whichever thread asks for it. So both find
what torch and its libraries keep for each thread, such as cuDNN's attention plans, as the warm-up
(training/run/warm_up.py) left it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from mpu.torch_private import active_modes
from mpu.worker import Worker, to_this_gpu

First = TypeVar("First")
Second = TypeVar("Second")
# seconds after which a wait lets Python see a signal that came just before it, which woke nothing
SIGNALS = 0.5


def _nothing() -> None:
    pass


class Interleaver:
    """Whose turn it is: that of the first computation, in the caller's thread, or of the second,
    in a thread that lives as long as this object. Where only one runs, `switch` does nothing.
    """

    def __init__(self) -> None:
        self._worker = Worker("weft-backward")
        self._may_run: tuple[threading.Semaphore, threading.Semaphore] | None = None
        self._now = 0
        self._failed = False
        self._resume: Callable[[], None] = _nothing

    @property
    def two(self) -> bool:
        """Return whether another computation can go on."""
        return self._may_run is not None

    def switch(self) -> None:
        """Let the other computation run until it switches or ends.

        Called by the one that runs, in whichever thread: autograd has threads of its own. Raises
        RuntimeError where the other one has failed.
        """
        both = self._may_run  # the other one clears it at its end
        if both is not None:
            mine, self._now = self._now, 1 - self._now
            both[1 - mine].release()
            while not both[mine].acquire(timeout=SIGNALS):
                pass
            self._resume()
        if self._failed:
            raise RuntimeError("the interleaved micro-batch failed")

    def run(
        self,
        first: Callable[[], First],
        second: Callable[[], Second],
        resume: Callable[[], None] = _nothing,
    ) -> tuple[First, Second]:
        """Return what both return. Raises what the one that fails first raises, after both ended.

        resume: called in the thread of the one whose turn begins, and at the end in this one. A
        second one that has not begun when the first one fails does not begin.
        """
        assert self._may_run is None, "two computations are already interleaved"
        both = self._may_run = threading.Semaphore(0), threading.Semaphore(0)
        self._now, self._failed, self._resume = 0, False, resume
        results: list[Any] = [None, None]
        errors: list[BaseException] = []
        inside, ended = _as_here(), threading.Event()

        def work(which: int, run: Callable[[], Any]) -> None:
            try:
                resume()
                results[which] = run()
            except BaseException as error:
                errors.append(error)
                self._failed = True

        def end(which: int) -> None:
            self._may_run, self._now = None, 1 - which  # the other is alone
            both[1 - which].release()

        def as_there() -> Second | None:
            if self._failed:
                return None
            with inside:
                return second()

        def behind() -> None:
            both[1].acquire()
            work(1, as_there)
            end(1)
            ended.set()

        self._worker.put(behind)
        try:
            work(0, first)
        finally:
            while not ended.is_set():
                try:
                    end(0)
                    ended.wait(SIGNALS)
                except BaseException as error:  # a signal's: the second ends at its next switch
                    errors.append(error)
                    self._failed = True
            self._may_run, self._failed, self._resume = None, False, _nothing
            resume()
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # a traceback holds this frame, and that all that both computed
        return results[0], results[1]


def _as_here() -> contextlib.AbstractContextManager[Any]:
    """Return what gives another thread what torch keeps for this one: the GPU and its stream, how
    many threads an operation has, grad mode, autocast, and the modes by which tools watch.

    The GPU comes first: StreamContext.__exit__ goes back to the stream before, and to its GPU
    (torch/cuda/__init__.py).
    """
    move = to_this_gpu()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    modes = active_modes()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            modes.append(torch.autocast(kind, torch.get_autocast_dtype(kind)))

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            move()
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            stack.enter_context(torch.set_grad_enabled(grad))
            for mode in modes:
                stack.enter_context(mode)
            yield

    return inside()
