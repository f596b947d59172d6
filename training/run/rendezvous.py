# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of all ranks at MASTER_ADDR:MASTER_PORT.

Within the timeout it reports which ranks did not connect, and whether a rank that did has other
settings.

torchrun keeps one store over all restarts of a run, so an answer found there may be stale. After a
restart its agents may also count restarts differently, so the count does not identify the start.
Rank 0 therefore draws a name for this start, and the others prove by a nonce that they are alive:

    rank r   hello/r = nonce, restarts, "" or why this rank refuses to start
    rank 0   answer/nonce = name
    rank r   name/here/r = where it is, and a digest of its settings
    rank 0   name/roll = "", or why nothing starts, once all are here or the time is up;
             "settings: r" where r is the first rank with another digest
    rank r   name/settings = its settings
    rank 0   name/verdict = how they differ

`calls` counts the ranks' writes, so that rank 0 polls one number while no rank connects. The keys
that the ranks write later are stored under the same name.
"""

import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from mpu.launch import Launch
from training.faults.activity import Activity
from training.faults.address import is_loopback, listen, resolve
from training.faults.store import await_key, late_ranks, place_of, poll, spans
from training.faults.wire import PRINTED
from training.files.untrusted import printable
from training.run.same_settings import difference
from training.settings.config import UsageError

SHORT = timedelta(seconds=5)  # how long a rank with a mistake tries to reach the others
ACKNOWLEDGED = 5.0  # seconds, at most, that rank 0 waits for all others to read why nothing starts
ATTEMPT = 5.0  # seconds, at most, of the first attempt to connect to rank 0's store
MARGIN = 2.0  # seconds after the deadline in which rank 0 can report who is missing
ABSENT = "absent: "  # prefix of a verdict that is not a mistake
OTHER = "settings: "  # prefix of a verdict that asks a rank for its settings
ASKED = 30.0  # seconds, at most, that a rank takes to send them
LOOK = 5.0  # seconds after which rank 0 checks each rank even if the count has not changed
T = TypeVar("T")
State = list[Callable[[], str]]  # one function, which returns the error if nothing more happens


class RendezvousError(UsageError):
    """Not all ranks connected to MASTER_ADDR:MASTER_PORT in time. reported: by rank 0, to all."""

    def __init__(self, text: str, reported: bool = False) -> None:
        super().__init__(text)
        self.reported = reported


def meet(
    timeout: timedelta,
    launch: Launch,
    refused: str = "",
    activity: Activity | None = None,
    settings: str = "",
) -> dist.Store:
    """Return a store that the ranks of this start share, once all have connected.

    refused: why this rank does not start. activity: prints which ranks are late. settings: what all
    ranks must have in common (same_settings.py). Raises RendezvousError if ranks do not connect
    within `timeout`, UsageError, on every rank, if one refuses or has other settings.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    activity = activity or Activity(launch)

    def run(state: State) -> dist.Store:
        try:
            store = _open(launch, deadline, timeout, state, activity)
            state[0] = lambda: f"rank 0's store at {_where(launch)} no longer answers"
            join = _rank_0 if launch.rank == 0 else _other_rank
            name = join(store, launch, deadline, refused, activity, settings)
        except RuntimeError as error:  # torch's, whose other lines are C++ frames
            text = printable(str(error).splitlines()[0])
            raise RendezvousError(f"{state[0]()}: {text}") from None
        return dist.PrefixStore(f"weft/{name}", store)

    return _within(timeout.total_seconds() + 2 * MARGIN, run)


def _where(launch: Launch) -> str:
    return f"MASTER_ADDR:MASTER_PORT ({launch.point.host}:{launch.point.port})"


def _within(seconds: float, run: Callable[[State], T]) -> T:
    """Return run(state); after `seconds`, raise RendezvousError with the message of the state.

    torch's store may block forever in C++: then the thread is abandoned.
    """
    state, result, errors = State([str]), list[T](), list[BaseException]()

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
        raise RendezvousError(state[0]())
    return result[0]


def _open(
    launch: Launch, deadline: float, timeout: timedelta, state: State, activity: Activity
) -> dist.Store:
    """Open the store, which rank 0 hosts unless torchrun's agent does."""
    host, port, world = launch.point.host, launch.point.port, launch.world
    if launch.rank == 0 and not launch.point.agent:
        try:
            address = resolve(host)
            if is_loopback(address) and launch.local_world < world:
                address = ""  # other hosts reach this one at another address
            listener, _ = listen(address, port, max(world, 128))
        except OSError as error:
            raise RendezvousError(f"rank 0 cannot listen at {_where(launch)}: {error}") from None
        fd = listener.detach()
        return dist.TCPStore(host, port, world, True, timeout, False, master_listen_fd=fd)
    who, why = "torchrun's agent" if launch.point.agent else "rank 0", ["no answer"]
    with activity.waiting(
        f"waiting for {who}",
        lambda: f"waiting for {who} to connect to {_where(launch)}: {printable(why[0])}",
        limit=timeout.total_seconds(),
        over=lambda: f"{who} connected to {_where(launch)}",
    ):
        store = _connected(launch, deadline, timeout, state, why)
        if store is None:  # raise in the block: its normal end prints success
            raise RendezvousError(f"{_absent(launch, timeout)}: {printable(why[0])}")
    store.set_timeout(timeout)
    return store


def _absent(launch: Launch, timeout: timedelta) -> str:
    who = "torchrun's agent" if launch.point.agent else "rank 0"
    return f"{who} did not connect to {_where(launch)} in {timeout.total_seconds():.0f} s"


def _not_a_store(launch: Launch, timeout: timedelta) -> str:
    """Return why torch cannot connect to the store: nothing listens there, or another program."""
    try:
        socket.create_connection((launch.point.host, launch.point.port), timeout=2.0).close()
    except OSError as error:
        return f"{_absent(launch, timeout)}: {error}"
    return f"the program at {_where(launch)} is not rank 0's store"


def _connected(
    launch: Launch, deadline: float, timeout: timedelta, state: State, why: list[str]
) -> dist.Store | None:
    """Return rank 0's store, or None after the deadline. why[0]: is set to the last error."""
    host, port, world, attempt = launch.point.host, launch.point.port, launch.world, ATTEMPT
    while True:
        try:
            # torch would print its C++ frames at each failed attempt
            socket.create_connection((host, port), timeout=2.0).close()
            if (left := deadline - time.monotonic()) <= 0:
                return None
            state[0] = partial(_not_a_store, launch, timeout)
            # less than the time that is left: the listener may be gone by now, as a rank 0 that
            # refuses to start is, and torch would keep trying to connect
            short = timedelta(seconds=min(attempt, left / 3))
            return dist.TCPStore(host, port, world, False, short, False)
        except OSError as error:
            why[0] = str(error)
            if time.monotonic() >= deadline:
                return None
        except RuntimeError as error:  # torch's, whose other lines are C++ frames
            why[0] = f"the program there is not rank 0's store: {str(error).splitlines()[0]}"
            attempt *= 2  # connect once more even if the time is over: the listener may be gone
        time.sleep(0.1)


def _rank_0(
    store: dist.Store,
    launch: Launch,
    deadline: float,
    refused: str,
    activity: Activity,
    settings: str,
) -> str:
    """Wait for all ranks; return the name of this start. Raises UsageError, RendezvousError."""
    name, begun = secrets.token_hex(8), time.monotonic()
    absent, told = set(range(1, launch.world)), list[int]()
    verdict, reported = f"rank 0: {refused}" if refused else "", False
    names = dist.PrefixStore(f"weft/{name}", store)
    own, odd = _digest(settings), list[int]()
    names.set("here/0", place_of(launch, own))

    def missing() -> str:
        told[:] = told or sorted(absent)
        who = late_ranks(sorted(absent), names, launch)
        return f"waiting for {who} to connect to {_where(launch)}" if absent else ""

    with activity.waiting(
        "waiting for the other ranks",
        missing,
        limit=deadline - begun,
        over=lambda: "" if absent else f"{late_ranks(told, names, launch)} connected",
        on_line=lambda: names.set("late/roll", ""),
    ):
        hellos, calls, looked, pause = dict[int, bytes](), -1, 0.0, 0.005
        while absent and time.monotonic() < deadline:
            now, before, calls = time.monotonic(), calls, store.add("weft/calls", 0)
            looks = calls != before or now > looked + LOOK
            looked = now if looks else looked
            for rank in sorted(absent) if looks else ():
                if store.check([f"weft/hello/{rank}"]):
                    hello = store.get(f"weft/hello/{rank}")
                    if hellos.get(rank) != hello:
                        hellos[rank] = hello
                        nonce, attempt, why = hello.decode().split(" ", 2)
                        store.set(f"weft/answer/{nonce}", name)
                        if why and attempt == str(launch.attempt):  # not of an earlier start
                            verdict = verdict or f"rank {rank}: {printable(why)}"
                    if names.check([f"here/{rank}"]):
                        absent.remove(rank)
                        *_, theirs = json.loads(names.get(f"here/{rank}"))
                        odd += [rank] if theirs != own else []
            if verdict and not reported:
                names.set("roll", verdict)
                reported, deadline = True, min(deadline, time.monotonic() + ACKNOWLEDGED)
            if absent:
                time.sleep(pause)
                pause = min(0.1, 1.5 * pause)
    if absent and not verdict:
        seconds, late = time.monotonic() - begun, sorted(absent)
        verdict = f"{ABSENT}{spans(late)} did not connect to {_where(launch)} in {seconds:.0f} s"
        if launch.local_world < launch.world:
            verdict += f": {late_ranks(late, names, launch)}"
    if odd and not verdict:
        reported, other = True, min(odd)
        names.set("roll", f"{OTHER}{other}")
        theirs = poll(names, "settings", time.monotonic() + ASKED)
        verdict = f"{ABSENT}rank {other} connected and then ended"
        if theirs is not None:
            verdict = difference(settings, theirs, other)
        names.set("verdict", verdict)
    if not reported:
        names.set("roll", verdict)
    if not verdict:
        return name
    here, deadline = launch.world - 1 - len(absent), time.monotonic() + ACKNOWLEDGED
    while names.add("heard", 0) < here and time.monotonic() < deadline:
        time.sleep(0.02)  # rank 0 may host the store, which would end with it
    raise _error(verdict)


def _digest(settings: str) -> str:
    return hashlib.sha256(settings.encode()).hexdigest()


def _other_rank(
    store: dist.Store,
    launch: Launch,
    deadline: float,
    refused: str,
    activity: Activity,
    settings: str,
) -> str:
    """Register at rank 0; return the name of this start. Raises UsageError, RendezvousError."""
    nonce, until = secrets.token_hex(8), deadline + MARGIN
    where = _where(launch)

    def gone() -> RendezvousError:
        return RendezvousError(
            f"rank 0 did not connect to {where}, or ended, before all ranks were connected"
        )

    store.set(f"weft/hello/{launch.rank}", f"{nonce} {launch.attempt} {refused}")
    store.add("weft/calls", 1)
    answers = f"rank 0 to connect to {where}"
    name = await_key(
        store, f"weft/answer/{nonce}", until, gone,
        activity=activity, wait="", what=answers,
    )  # fmt: skip
    names = dist.PrefixStore(f"weft/{name}", store)
    names.set(f"here/{launch.rank}", place_of(launch, _digest(settings)))
    store.add("weft/calls", 1)
    calls = f"rank 0, connected to {where}, to report that all ranks are there"
    verdict = await_key(names, "roll", until, gone, activity=activity, wait="roll", what=calls)
    if verdict.startswith(OTHER):
        if verdict == f"{OTHER}{launch.rank}":
            names.set("settings", settings)
        verdict = await_key(
            names, "verdict", time.monotonic() + ASKED + MARGIN, gone,
            activity=activity, wait="settings", what="rank 0 to compare the ranks' settings",
        )  # fmt: skip
    if not verdict:
        return name
    names.add("heard", 1)
    raise _error(verdict)


def _error(verdict: str) -> UsageError:
    if verdict.startswith(ABSENT):
        return RendezvousError(printable(verdict.removeprefix(ABSENT), most=PRINTED), reported=True)
    return UsageError(printable(verdict, most=PRINTED))
