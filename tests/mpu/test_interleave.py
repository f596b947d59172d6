# SPDX-License-Identifier: Apache-2.0
"""Two computations that take turns: their threads, what these keep and leave, and their errors."""

import gc
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpu.comm.p2p import SendQueue
from mpu.comm.transport import Handle
from mpu.interleave import Interleaver
from mpu.worker import Worker

PAIRS = 20


def test_all_pairs_have_the_same_two_threads() -> None:
    """What a library keeps for a thread, as cuDNN its plans, is made once for each of the two."""
    interleaver, kept, threads = Interleaver(), threading.local(), list[Any]()
    made = {"forward": 0, "backward": 0}

    def work(kind: str) -> None:
        for _ in range(3):
            if not hasattr(kept, "plan"):
                kept.plan = kind
                made[kind] += 1
            threads.append((kind, threading.current_thread()))
            interleaver.switch()

    work("forward")  # one that overlaps nothing, as in a pipeline's warm-up
    interleaver.run(lambda: work("forward"), lambda: work("backward"))
    count = threading.active_count()
    for _ in range(PAIRS):
        interleaver.run(lambda: work("forward"), lambda: work("backward"))
    assert made == {"forward": 1, "backward": 1} and threading.active_count() == count
    assert len(set(threads)) == 2


def test_a_thread_ends_with_its_owner() -> None:
    before, threads = set(threading.enumerate()), set[threading.Thread]()
    for _ in range(5):
        interleaver = Interleaver()
        for _ in range(2):
            interleaver.run(lambda: None, lambda: threads.add(threading.current_thread()))
        del interleaver
    for thread in threads:
        thread.join(20)
    assert len(threads) == 5 and set(threading.enumerate()) <= before


@pytest.mark.parametrize("fails", ["neither", "first", "second"])
def test_nothing_is_kept_from_pair_to_pair(fails: str) -> None:
    """Neither the computations nor what they return or raise, without the garbage collector."""
    interleaver, alive = Interleaver(), list[weakref.ref[Any]]()

    def work(name: str) -> Callable[[], Any]:
        graph = torch.nn.Identity()
        alive.append(weakref.ref(graph))

        def run() -> Any:
            result = torch.nn.Identity()
            alive.append(weakref.ref(result))
            interleaver.switch()
            if name == fails:
                raise KeyError(graph.training)
            return result

        return run

    def pair() -> None:
        try:
            interleaver.run(work("first"), work("second"))
        except KeyError:
            assert fails != "neither"

    gc.collect()
    gc.disable()
    try:
        pair()
        assert len(alive) == 4 and [ref for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


def test_a_child_has_a_thread_of_its_own() -> None:
    """A fork takes no thread along."""
    interleaver = Interleaver()
    interleaver.run(lambda: None, lambda: None)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if interleaver.run(lambda: 1, lambda: 2) == (1, 2) else 1)
    assert os.waitpid(child, 0)[1] == 0 and interleaver.run(lambda: 1, lambda: 2) == (1, 2)


def planted_in_the_second() -> None:
    raise KeyError("planted")


def test_an_error_has_the_lines_that_it_came_from() -> None:
    with pytest.raises(KeyError, match="planted") as caught:
        Interleaver().run(lambda: None, planted_in_the_second)
    lines = traceback.extract_tb(caught.value.__traceback__)
    assert "planted_in_the_second" in [line.name for line in lines]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_the_second_does_not_begin_after_the_first_has_failed(kind: type[BaseException]) -> None:
    interleaver, begun = Interleaver(), list[str]()

    def first() -> None:
        raise kind("planted")

    for _ in range(2):
        with pytest.raises(kind, match="planted"):
            interleaver.run(first, lambda: begun.append("second"))
    assert begun == [] and interleaver.run(lambda: 1, lambda: 2) == (1, 2)


@pytest.mark.parametrize("alone", [False, True])
def test_a_signal_ends_both(alone: bool) -> None:
    """It is raised in the main thread while that waits for the other's turn, or for its end."""
    interleaver, ended = Interleaver(), list[str]()

    def first() -> None:
        if not alone:
            interleaver.switch()
            ended.append("not raised")

    def second() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            while True:
                gone.wait(0.01)
                interleaver.switch()
        finally:
            ended.append("second")

    gone = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        interleaver.run(first, second)
    assert ended == ["second"]
    assert interleaver.run(lambda: 1, lambda: 2) == (1, 2) and not interleaver.two


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.append(threading.current_thread())
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    threads: list[threading.Thread] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ones:
            self.threads.append(threading.current_thread())
        return func(*args, **(kwargs or {}))


def test_both_threads_compute_in_the_same_way() -> None:
    """Grad mode, autocast, modes, and how many threads an operation has, in each pair anew."""
    interleaver, threads = Interleaver(), torch.get_num_threads()

    def state() -> tuple[Any, ...]:
        torch.ones(1)
        here = torch.is_grad_enabled(), torch.get_num_threads(), torch.is_autocast_enabled("cpu")
        return *here, torch.get_autocast_dtype("cpu")

    try:
        for count in (2, 3, 1):
            torch.set_num_threads(count)
            with torch.no_grad(), torch.autocast("cpu", torch.float16), Called(), Seen() as seen:
                first, second = interleaver.run(state, state)
            assert first == second == (False, count, True, torch.float16)
            assert len(set(seen.threads)) == 2 and len(set(Called.threads)) == 2
            first, second = interleaver.run(state, state)
            assert first == second and first[0] and not first[2]
    finally:
        torch.set_num_threads(threads)


class FakeCuda:
    """What a CUDA runtime keeps: each thread's GPU, which is 0 at first, and the contexts made.

    torch.cuda.set_device and StreamContext are torch's own.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.contexts, self.calls = set[int](), list[tuple[threading.Thread, str]]()
        self.own = threading.local()
        self.streams = [SimpleNamespace(device=torch.device("cuda", n), number=0) for n in range(4)]
        for name, fake in dict(
            is_available=lambda: True, is_initialized=lambda: True, current_device=self.current,
            current_stream=self.current_stream, set_stream=self.set_stream,
            _exchange_device=self.exchange, _maybe_exchange_device=self.exchange,
        ).items():  # fmt: skip
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch._C, "_cuda_setDevice", self.set_device, raising=False)

    def current(self) -> int:
        return getattr(self.own, "device", 0)

    def note(self, what: str) -> None:
        self.calls.append((threading.current_thread(), what))

    def set_device(self, device: int) -> None:
        self.note("set_device")
        self.contexts.add(device)
        self.own.device = device

    def exchange(self, device: int) -> int:  # makes no context, as torch's does not at its end
        before, self.own.device = self.current(), device
        return before

    def current_stream(self, device: Any = None) -> Any:
        self.note("stream")
        number = self.current() if device is None else device.index
        return getattr(self.own, f"stream{number}", self.streams[number])

    def set_stream(self, stream: Any) -> None:
        self.note("stream")
        if self.current() != stream.device.index:
            self.contexts.add(stream.device.index)  # as THCPModule_setStream does
            self.own.device = stream.device.index
        setattr(self.own, f"stream{stream.device.index}", stream)


def test_no_context_is_made_on_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread goes to its rank's GPU before it touches a stream, and stays there."""
    cuda = FakeCuda(monkeypatch)
    torch.cuda.set_device(torch.device("cuda", 3))
    side = SimpleNamespace(device=torch.device("cuda", 3), number=7)
    interleaver, seen = Interleaver(), list[Any]()

    def work() -> None:
        for _ in range(3):
            where = threading.current_thread() is threading.main_thread()
            seen.append((where, cuda.current(), cuda.current_stream().number))
            interleaver.switch()

    for stream in (cuda.streams[3], side, cuda.streams[3]):
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            interleaver.run(work, work)
        assert set(seen) == {(main, 3, stream.number) for main in (True, False)}
        seen.clear()
    assert cuda.contexts == {3}
    for thread in {thread for thread, _ in cuda.calls}:
        assert next(what for of, what in cuda.calls if of is thread) == "set_device"


class Message(Handle):
    """A handle whose wait notes its thread, or fails."""

    def __init__(self, threads: list[Any], fails: bool = False) -> None:
        super().__init__()
        self.threads, self.fails = threads, fails

    def wait(self) -> None:
        self.threads.append(threading.current_thread())
        if self.fails:
            raise RuntimeError("planted")


def test_sends_of_all_steps_wait_in_one_thread() -> None:
    worker, threads, alive = Worker("send-queue"), list[Any](), list[weakref.ref[Any]]()
    for _ in range(PAIRS):
        with SendQueue(False, worker) as queue:
            for _ in range(2):
                message = Message(threads)
                alive.append(weakref.ref(message))
                queue.put(message)
    del message
    assert len(threads) == 2 * PAIRS and len(set(threads)) == 1
    assert [ref for ref in alive if ref() is not None] == []
    with pytest.raises(RuntimeError, match="planted"), SendQueue(False, worker) as queue:
        queue.put(Message(threads, fails=True))
        queue.put(Message(threads))
    gate = threading.Event()
    stuck: Any = SimpleNamespace(wait=gate.wait)  # for a rank that is gone
    with pytest.raises(KeyError), SendQueue(False, worker) as queue:
        queue.put(stuck)
        raise KeyError
    with SendQueue(False, worker) as queue:  # waits for its own messages only
        queue.put(Message(threads))
    gate.set()
    assert len(set(threads)) == 2
    del worker, queue
    gc.collect()  # the error's traceback holds the queue that holds the error
    for thread in set(threads):
        thread.join(20)
        assert not thread.is_alive()
