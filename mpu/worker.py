# SPDX-License-Identifier: Apache-2.0
"""A thread that lives as long as its owner and does one thing after another, and a thread's GPU.

What libraries keep for each thread (cuDNN's attention plans, cuBLAS handles, OpenMP's threads) is
made once in it. A thread for each piece of work would make, and partly leak, it each time.
"""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch

Job = Callable[[], None]


def to_this_gpu() -> Callable[[], None]:
    """Return what moves another thread to this thread's GPU; it does nothing where CUDA is unused.

    A thread begins at GPU 0. It calls this before anything of CUDA, whose calls make a context on
    the current GPU, about 0.5 GB a process.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_stream().device)


class Worker:
    """Does what `put` gives it, in order, in a thread that the first `put` starts.

    The thread ends when its Worker is freed, keeps nothing of what it has done, and is a daemon:
    one that hangs does not keep the process from ending. name: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._end: weakref.finalize | None = None  # type: ignore[type-arg]

    def put(self, job: Job) -> None:
        """Let the thread do this after all that was put before. What it raises ends the thread."""
        if self._thread is None or not self._thread.is_alive():  # a fork takes no thread along
            self.leave()
            jobs = self._jobs = SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=(jobs,), name=self._name, daemon=True
            )
            self._end = weakref.finalize(self, jobs.put, None)
            self._thread.start()
        self._jobs.put(job)

    def leave(self) -> None:
        """Leave the thread to itself: it ends after what was put. The next work has a new one."""
        if self._end is not None:
            self._end()
        self._thread = self._end = None


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # while this waits, what it holds may be freed
