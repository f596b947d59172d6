# SPDX-License-Identifier: Apache-2.0
"""Start ranks on this machine, and wait until all have ended.

A rank is a new process, forked from a server that has imported torch once. At its time limit it
writes its stack to a file.
"""

import faulthandler
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from mpu.torch_private import COMPILER

GRACE = 5.0  # seconds for the other ranks to answer, after one has failed
Tell = Callable[[Any], None]  # sends a rank's answer


class Ended(NamedTuple):
    """How a rank ended: its answer, if any, and its exit code; None: it was killed."""

    answer: Any
    code: int | None


def launch(
    count: int,
    work: Callable[[int, Tell], None],
    folder: Path,
    limit: float,
    modules: Sequence[str] = (),
) -> list[Ended]:
    """Run work(rank, tell) in `count` processes; return how each ended.

    work: a function that other processes can find by its name. If it raises, or exits with another
    code than 0, the other ranks have GRACE seconds. limit: seconds for the work, after which a rank
    writes its stack to `folder` and ends. modules: to be imported by the server, besides torch and
    its compiler, which an optimizer would otherwise import, in seconds.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.forkserver_start", __name__, *modules, COMPILER])
    ranks: list[tuple[Any, Connection]] = []
    answers = dict[Connection, Any]()
    try:
        for rank in range(count):
            here, there = context.Pipe(duplex=False)
            log = log_of(folder, rank)
            log.unlink(missing_ok=True)
            process = context.Process(target=_rank, args=(rank, work, there, log, limit))
            process.start()
            there.close()
            ranks.append((process, here))
        for _, pipe in ranks:
            _received(pipe)  # it has begun: the first ones wait for the server's imports
        deadline = time.monotonic() + limit + GRACE
        while running := {p.sentinel: p for p, _ in ranks if p.exitcode is None}:
            silent = [pipe for _, pipe in ranks if pipe not in answers]
            for ready in wait([*running, *silent], max(0.0, deadline - time.monotonic())):
                if isinstance(ready, Connection):
                    answers[ready] = _received(ready)
            if any(process.exitcode for process, _ in ranks):
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() >= deadline:
                break
        for _, pipe in ranks:
            if pipe not in answers:
                answers[pipe] = _received(pipe) if pipe.poll() else None
        return [Ended(answers[pipe], process.exitcode) for process, pipe in ranks]
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            process.close()
            pipe.close()


def _received(pipe: Connection) -> Any:
    """Return a rank's answer, None if it ended without one."""
    with suppress(EOFError, OSError):
        return pipe.recv()
    return None


def _rank(
    rank: int, work: Callable[[int, Tell], None], pipe: Connection, log: Path, limit: float
) -> None:
    """Run one rank in this process."""
    pipe.send(None)
    with open(log, "w") as file:
        faulthandler.dump_traceback_later(limit, exit=True, file=file)
        work(rank, pipe.send)
        faulthandler.cancel_dump_traceback_later()


def log_of(folder: Path, rank: int) -> Path:
    """Return the file to which a hanging rank writes its stack."""
    return folder / f"stack.{rank}"


def where(ended: Sequence[Ended], folder: Path, limit: float, model: str = "") -> str:
    """Return how ranks ended that sent no answer, and where hanging ranks were, in words.

    limit: the seconds that they had. model: a file whose line is returned if a rank is in it; else
    it is the line that waits for others.
    """
    places = []
    for rank, (answer, code) in enumerate(ended):
        path = log_of(folder, rank)
        text = path.read_text() if path.is_file() else ""
        lines = text.rpartition("most recent call first")[2].splitlines()  # of the main thread
        frames = [line.strip() for line in lines if line.strip().startswith("File ")]
        frames = [frame for frame in frames if "/mpu/comm/" not in frame] or frames
        if code and answer is None:
            places.append(f"rank {rank} ended: {_code(code, limit, bool(frames))}")
        if frames:
            frame = next((f for f in frames if model and model in f), frames[0])
            file, _, at = frame.removeprefix('File "').partition('", ')
            places.append(f"rank {rank} was in {Path(file).name} {at}")
    return "; ".join(places)


def _code(code: int, limit: float, hung: bool) -> str:
    """Return how a process ended, in words."""
    if code < 0:
        return f"signal {-code} ({signal.strsignal(-code)})"
    return f"it took longer than {limit:.0f} s" if hung else f"exit code {code}"
