# SPDX-License-Identifier: Apache-2.0
"""Interleave two computations of a rank: one runs while the other's messages are in flight.

    forward of micro-batch i + 1    attention, router, send rows   |          | experts ...
    backward of micro-batch i                                      | combine  |

A layer starts an exchange of rows between experts, calls `switch`, and waits for the exchange when
`switch` returns: meanwhile the other micro-batch computes (`--overlap-moe-expert-parallel-comm`).
Each needs its own Python stack, so the backward runs in a second thread, which all pairs share. The
two never run at the same time: one continues when the other switches or ends. So the order of a
rank's launches and messages depends only on the layers, and is the same on every rank of a stage.

Every forward of a rank, interleaved or not, runs in the thread that called the engine, and every
backward on a GPU runs in autograd's thread of that GPU, whichever thread calls it. So both find the
per-thread state of torch and its libraries, such as cuDNN's attention plans, as the warm-up
(training/run/warm_up.py) created it.
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
# seconds after which a wait returns to Python, to handle a signal that arrived just before the wait
SIGNALS = 0.5


def _nothing() -> None:
    pass


class Interleaver:
    """Alternates two computations: the first in the caller's thread, the second in a thread that
    lives as long as this object. If only one runs, `switch` does nothing.
    """

    def __init__(self) -> None:
        self._worker = Worker("weft-backward")
        self._may_run: tuple[threading.Semaphore, threading.Semaphore] | None = None
        self._now = 0
        self._failed = False
        self._resume: Callable[[], None] = _nothing

    @property
    def two(self) -> bool:
        """Return whether there is another computation to switch to."""
        return self._may_run is not None

    def switch(self) -> None:
        """Run the other computation until it switches or ends.

        Called by the running one, in any thread, as autograd has its own threads. Raises
        RuntimeError if the other one has failed.
        """
        both = self._may_run  # the other computation clears it when it ends
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
        """Run both; return both results. Raises the error that occurred first, after both ended.

        resume: called in the thread of the computation whose turn begins, and at the end in this
        thread. If the first computation fails before the second has begun, the second never runs.
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
                except BaseException as error:  # of a signal: the second ends at its next switch
                    errors.append(error)
                    self._failed = True
            self._may_run, self._failed, self._resume = None, False, _nothing
            resume()
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # a traceback references this frame, and so all results
        return results[0], results[1]


def _as_here() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that gives another thread this thread's torch state: the GPU and its
    stream, the number of threads of an operation, grad mode, autocast, and the modes of tools.

    The GPU comes first: StreamContext.__exit__ restores the previous stream and its GPU
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
