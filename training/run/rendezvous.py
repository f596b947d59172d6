# SPDX-License-Identifier: Apache-2.0
"""Meet at MASTER_ADDR:MASTER_PORT, or say within the timeout who did not come.

torchrun keeps one store over all restarts of a run, so an answer found there may be an old one. And
after a restart its agents may count restarts differently, so their count does not name the start.
Rank 0 therefore draws a name for this start, and the others show that they are alive now:

    rank r   hello/r = nonce, restarts, "" or why this rank refuses to start
    rank 0   answer/nonce = name
    rank r   name/here/r
    rank 0   name/roll = "", or why nothing starts, once all are here or the time is up

What the ranks tell each other later is kept under that name.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from mpu.launch import Launch
from training.config import UsageError
from training.faults.address import is_loopback, listen, resolve
from training.faults.hang_detector import named
from training.faults.wire import printable

SHORT = timedelta(seconds=5)  # how long a rank with a mistake looks for the others
ACKNOWLEDGED = 5.0  # seconds, at most, that rank 0 waits for all others to read why nothing starts
ATTEMPT = 5.0  # seconds, at most, of the first attempt to connect to rank 0's store
MARGIN = 2.0  # seconds that the others give rank 0 to tell them who is missing
ABSENT = "absent: "  # begins a verdict that is no mistake
T = TypeVar("T")


class RendezvousError(UsageError):
    """Not all ranks came to MASTER_ADDR:MASTER_PORT in time. reported: by rank 0, to all."""

    def __init__(self, text: str, reported: bool = False) -> None:
        super().__init__(text)
        self.reported = reported


def meet(timeout: timedelta, launch: Launch, refused: str = "") -> dist.Store:
    """Return a store that the ranks of this start share, once all are here.

    refused: why this rank does not start. Raises RendezvousError where ranks stay away for
    `timeout`, UsageError with the reason where one refuses.
    """
    deadline = time.monotonic() + timeout.total_seconds()

    def run(state: list[str]) -> dist.Store:
        try:
            store = _open(launch, deadline, timeout, state)
            state[0] = f"rank 0's store at {_where(launch)} no longer answers"
            name = _rank_0(store, launch, deadline, refused) if launch.rank == 0 else ""
            name = name or _other_rank(store, launch, deadline, refused)
        except RuntimeError as error:  # torch's, whose other lines are C++ frames
            text = printable(str(error).splitlines()[0])
            raise RendezvousError(f"{state[0]}: {text}") from None
        return dist.PrefixStore(f"weft/{name}", store)

    return _within(timeout.total_seconds() + 2 * MARGIN, run)


def _where(launch: Launch) -> str:
    return f"MASTER_ADDR:MASTER_PORT ({launch.point.host}:{launch.point.port})"


def _within(seconds: float, run: Callable[[list[str]], T]) -> T:
    """Return run(state), or raise RendezvousError with the last state after so many seconds.

    torch's store may wait for ever in C++: then the thread is left to itself.
    """
    state, result, errors = [""], list[T](), list[BaseException]()

    def work() -> None:
        try:
            result.append(run(state))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="meeting", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not result:
        raise RendezvousError(state[0])
    return result[0]


def _open(launch: Launch, deadline: float, timeout: timedelta, state: list[str]) -> dist.Store:
    """Open the store: as its keeper on rank 0, unless torchrun's agent is that."""
    host, port, world = launch.point.host, launch.point.port, launch.world
    if launch.rank == 0 and not launch.point.agent:
        try:
            address = resolve(host)
            if is_loopback(address) and launch.local_world < world:
                address = ""  # what this host calls itself is not what the others call it
            listener, _ = listen(address, port, max(world, 128))
        except OSError as error:
            raise RendezvousError(f"rank 0 cannot listen at {_where(launch)}: {error}") from None
        fd = listener.detach()
        return dist.TCPStore(host, port, world, True, timeout, False, master_listen_fd=fd)
    why, attempt = "", ATTEMPT
    while True:
        try:
            # torch would print its frames about each vain attempt
            socket.create_connection((host, port), timeout=2.0).close()
            if (left := deadline - time.monotonic()) <= 0:
                break
            state[0] = f"what listens at {_where(launch)} is not rank 0's store"
            # not all of the time that is left: what listened may have ended by now, as a rank 0
            # that refuses to start does, and torch would go on connecting to nobody
            short = timedelta(seconds=min(attempt, left / 3))
            store = dist.TCPStore(host, port, world, False, short, False)
            store.set_timeout(timeout)
            return store
        except OSError as error:
            why = str(error)
            if time.monotonic() >= deadline:
                break
        except RuntimeError as error:  # torch's, whose other lines are C++ frames
            why = f"what listens there is not rank 0's store: {str(error).splitlines()[0]}"
            attempt *= 2  # and a look, even if the time is over: it may have ended
        time.sleep(0.1)
    who = "torchrun's agent" if launch.point.agent else "rank 0"
    raise RendezvousError(
        f"{who} did not connect to {_where(launch)} in {timeout.total_seconds():.0f} s: "
        f"{printable(why)}"
    )


def _rank_0(store: dist.Store, launch: Launch, deadline: float, refused: str) -> str:
    """Call the roll; return the name of this start. Raises UsageError, RendezvousError."""
    name, begun = secrets.token_hex(8), time.monotonic()
    absent, hellos = set(range(1, launch.world)), dict[int, bytes]()
    verdict, reported = f"rank 0: {refused}" if refused else "", False
    pause = 0.005
    while absent and time.monotonic() < deadline:
        for rank in sorted(absent):
            if store.check([f"weft/hello/{rank}"]):
                hello = store.get(f"weft/hello/{rank}")
                if hellos.get(rank) != hello:
                    hellos[rank] = hello
                    nonce, attempt, why = hello.decode().split(" ", 2)
                    store.set(f"weft/answer/{nonce}", name)
                    if why and attempt == str(launch.attempt):  # not of an earlier start
                        verdict = verdict or f"rank {rank}: {printable(why)}"
                if store.check([f"weft/{name}/here/{rank}"]):
                    absent.remove(rank)
        if verdict and not reported:
            store.set(f"weft/{name}/roll", verdict)
            reported, deadline = True, min(deadline, time.monotonic() + ACKNOWLEDGED)
        if absent:
            time.sleep(pause)
            pause = min(0.1, 1.5 * pause)
    if absent and not verdict:
        seconds, who = time.monotonic() - begun, named(sorted(absent))
        verdict = f"{ABSENT}{who} did not connect to {_where(launch)} in {seconds:.0f} s"
    if not reported:
        store.set(f"weft/{name}/roll", verdict)
    if not verdict:
        return name
    here, deadline = launch.world - 1 - len(absent), time.monotonic() + ACKNOWLEDGED
    while store.add(f"weft/{name}/heard", 0) < here and time.monotonic() < deadline:
        time.sleep(0.02)  # rank 0 may be the store itself
    raise _error(verdict)


def _other_rank(store: dist.Store, launch: Launch, deadline: float, refused: str) -> str:
    """Say hello to rank 0; return the name of this start. Raises UsageError, RendezvousError."""
    nonce, late = secrets.token_hex(8), deadline + MARGIN
    gone = f"rank 0 did not connect to {_where(launch)}, or ended, before all ranks were there"
    store.set(f"weft/hello/{launch.rank}", f"{nonce} {launch.attempt} {refused}")
    name = await_key(store, f"weft/answer/{nonce}", late, gone)
    store.set(f"weft/{name}/here/{launch.rank}", "")
    verdict = await_key(store, f"weft/{name}/roll", late, gone)
    if not verdict:
        return name
    store.add(f"weft/{name}/heard", 1)
    raise _error(verdict)


def _error(verdict: str) -> UsageError:
    if verdict.startswith(ABSENT):
        return RendezvousError(printable(verdict.removeprefix(ABSENT)), reported=True)
    return UsageError(printable(verdict))


def await_key(store: dist.Store, key: str, deadline: float, late: str) -> str:
    """Return the value of a key once it is set. Raises RendezvousError(late) after the deadline.

    It asks again and again: a wait inside of torch's store would let no signal through.
    """
    pause = 0.005
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RendezvousError(late)
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    return store.get(key).decode()
