# SPDX-License-Identifier: Apache-2.0
"""A thread that lives as long as its owner and runs jobs one after another; a thread's GPU.

Libraries create their per-thread state (cuDNN's attention plans, cuBLAS handles, OpenMP's threads)
in it once. With a new thread for each job they would create, and partly leak, it each time.
"""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch

Job = Callable[[], None]


def to_this_gpu() -> Callable[[], None]:
    """Return a function that moves another thread to this thread's GPU, if CUDA is in use.

    A thread starts on GPU 0. It must call this before any other CUDA call, which would create a
    context on the current GPU, of about 0.5 GB per process.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_stream().device)


class Worker:
    """Runs jobs in the order of `put`, in a thread that the first `put` starts.

    The thread ends when its Worker is freed, keeps no references to finished jobs, and is a daemon,
    so that a hanging job does not keep the process from exiting. name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._end: weakref.finalize | None = None  # type: ignore[type-arg]

    def put(self, job: Job) -> None:
        """Queue a job, to run after all earlier ones. An exception in it ends the thread."""
        if self._thread is None or not self._thread.is_alive():  # a fork does not copy threads
            self.leave()
            jobs = self._jobs = SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=(jobs,), name=self._name, daemon=True
            )
            self._end = weakref.finalize(self, jobs.put, None)
            self._thread.start()
        self._jobs.put(job)

    def leave(self) -> None:
        """Detach the thread, which ends after its queued jobs. The next `put` starts a new one."""
        if self._end is not None:
            self._end()
        self._thread = self._end = None


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # so that its references can be freed while this waits
