# SPDX-License-Identifier: Apache-2.0
"""Judge how ranks ended, and count what faults cost a run: for tools/supervise.py.

A line of --log-json has "event", "time" (seconds since 1970), "attempt" and

    start    world, nodes, port, copy: the step in memory that ranks may begin at, or null
    fault    rank, node, cause, step: the last one done, detection_seconds: from that step's end,
             alike: the number of ranks, if all of them ended in the same way by themselves, else 0
    back     step: the first one after the fault; mttr_seconds from the fault's detection until that
             step is done, of which stop_seconds until all ranks had ended, start_seconds until the
             new ones trained; begun_at: the step they began at; source: nothing, disk or memory;
             steps_lost: done once more; goodput so far
    end      code, wall_seconds, restarts, mttr_seconds (mean, or null), steps_lost, goodput

goodput: the share of the wall time, since the supervisor began, in which steps were made that were
not lost again, evaluations and saves between them included.
"""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from training.faults.wire import printable

SOURCES = ("nothing", "disk", "memory")
FIRST = re.compile(r"rank (\d+) failed first(.*)")
ORDERLY, MISTAKE = (0, os.EX_TEMPFAIL), 2


class End(NamedTuple):
    """How a rank ended. code: negative for a signal's; None where nobody saw it.

    cause: what the rank said. killed: by its supervisor, after another rank's fault.
    """

    rank: int
    code: int | None
    cause: str = ""
    killed: bool = False

    @property
    def fault(self) -> bool:
        """Whether it is a reason to restart."""
        return not self.killed and self.code not in (*ORDERLY, MISTAKE)


class Fault(NamedTuple):
    """The first cause of an attempt's end. step: the last one done. alike: see `alike`."""

    attempt: int
    rank: int
    node: int
    cause: str
    step: int
    alike: int = 0

    @property
    def who(self) -> str:
        """Return the rank and its node, or that all ranks failed in the same way."""
        if self.alike:
            return f"all {self.alike} ranks" if self.alike > 1 else "the only rank"
        return f"rank {self.rank} on node {self.node}"


def verdict(ends: Sequence[End]) -> int | None:
    """Return the exit code that the run ends with, or None where the ranks are to be restarted.

    ends: of all ranks, in the order of their ends. A mistake (2) is not made again, unless a fault
    of another rank may be behind it. What a signal stopped (75) ends the run: somebody wants that.
    """
    if any(end.fault for end in ends):
        return None
    codes = {end.code for end in ends if not end.killed}
    if MISTAKE in codes:
        return MISTAKE
    if any(end.killed for end in ends):
        return None
    return max((code for code in codes if code is not None), default=0)


def first_cause(ends: Sequence[End]) -> tuple[int, str]:
    """Return the rank that failed first and why, of an attempt that is to be restarted."""
    causes = [(int(m[1]), m[2]) for end in ends if (m := FIRST.search(end.cause))]
    for end in ends:  # a process that was killed or crashed says nothing itself
        if end.fault and (end.code is None or end.code < 0):
            cause = next((text for rank, text in causes if rank == end.rank), "")
            why = f"ended by {signal_name(-end.code)}" if end.code else end.cause
            last = cause.partition("its last report")[2]
            return end.rank, f"{why}; its last report{last}" if last else why
    if causes:
        return causes[0][0], causes[0][1].lstrip(": ").strip()
    for end in ends:
        if end.fault:
            return end.rank, end.cause or f"exit code {end.code}"
    end = next(end for end in ends if end.killed)
    return end.rank, "it did not end when the others had"


def alike(ends: Sequence[End]) -> int:
    """Return the number of ranks if all ended by themselves with one code and one cause, else 0.

    Then no rank's host is to blame. A rank that says that another one failed first did not.
    """
    ways = {(end.code, end.cause) for end in ends}
    same = len(ways) == 1 and all(end.fault and not FIRST.search(end.cause) for end in ends)
    return len(ends) * same


def ended_by(number: int, ends: Sequence[End]) -> int:
    """Return the exit code of a run whose ranks got signal `number` before the first step, or 1."""
    theirs = {-number, 128 + number, *ORDERLY}
    return 128 + number if all(e.killed or e.code in theirs for e in ends) else 1


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def diagnosis(faults: Sequence[Fault]) -> str:
    """Return what is known of faults in a row without a new step between them, in one paragraph."""
    lines = [f"{len(faults)} faults in a row without a new step, so it is not started again"]
    lines += [f"  attempt {f.attempt}: {f.who}, after step {f.step}: {f.cause}" for f in faults]
    ranks, steps = {f.rank for f in faults}, {f.step for f in faults}
    if all(f.alike for f in faults):
        lines.append(
            f"  always {faults[0].who} alike: the flags, the program, the data or what the ranks "
            "share, rather than one host"
            if faults[0].alike > 1
            else "  the run has one rank: the flags, the program, the data, or this host"
        )
    elif len(ranks) == 1 and len(faults) > 1:
        lines.append(f"  always rank {faults[0].rank}: its host, its device, or what only it does")
    elif len(steps) == 1 and len(faults) > 1:
        lines.append(
            "  several ranks, at one step: that step's data, the flags or the program, rather than "
            "one host"
        )
    return "\n".join(lines)


@dataclass
class Attempt:
    """How far one attempt came: (iteration, seconds of the monotonic clock) at its ends."""

    first: int = 0
    began: float = 0.0
    last: int = 0
    ended: float = 0.0


@dataclass
class Report:
    """Count, print and log what faults cost. path: of the log, or None."""

    path: Path | None
    began: float = field(default_factory=time.monotonic)
    attempts: list[Attempt] = field(default_factory=list)
    repairs: list[float] = field(default_factory=list)
    steps_lost: int = 0
    best: int = 0  # the last step ever done
    restarts: int = 0
    fault: Fault | None = None  # the one that is being repaired
    _at: float = 0.0  # when that was detected
    _stopped: float = 0.0

    def log(self, event: str, **facts: Any) -> None:
        """Write a line of the log. A full disk does not end the run."""
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                row = {"event": event, "time": round(time.time(), 3), **facts}
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            say(f"--log-json {self.path}: {error.strerror}")

    def progress(self, record: Sequence[float], attempt: int) -> None:
        """Take note of rank 0's progress: first iteration, when, iteration, when, source."""
        now, last = self.attempts[-1], int(record[2])
        fresh = not now.began
        now.first, now.began, now.last, now.ended = int(record[0]), record[1], last, record[3]
        fault = self.fault
        if fault is not None and fresh:
            before = [attempt.last for attempt in self.attempts[:-1] if attempt.began]
            self.steps_lost += max((before[-1] if before else 0) - now.first, 0)
            self._source = SOURCES[int(record[4])]
        self.best = max(self.best, last)
        if fault is not None and last > fault.step:
            self.fault = None
            mttr = now.ended - self._at
            self.repairs.append(mttr)
            stop, start = self._stopped - self._at, now.began - self._stopped
            lost, source = max(fault.step - now.first, 0), self._source
            facts = {
                "mttr_seconds": mttr, "stop_seconds": stop, "start_seconds": start,
                "goodput": self.goodput(),
            }  # fmt: skip
            say(
                f"step {last} is done {mttr:.1f} s after the fault was seen: ranks gone in "
                f"{stop:.1f} s, training again in {start:.1f} s more, from step {now.first} "
                f"({source}), so {lost} steps were lost; goodput {self.goodput():.1%}"
            )
            self.log(
                "back", attempt=attempt, step=last, begun_at=now.first, source=source,
                steps_lost=lost, **{k: round(v, 4) for k, v in facts.items()},
            )  # fmt: skip

    def failed(
        self, attempt: int, rank: int, node: int, cause: str, seen: float, alike: int = 0
    ) -> Fault:
        """Take note of a fault that was seen at a time of the monotonic clock; ranks are gone."""
        now = self.attempts[-1]
        step = now.last if now.began else self.best
        fault = Fault(attempt, rank, node, cause, step, alike)
        waited = seen - now.ended if now.ended else seen - self.began
        say(f"attempt {fault.attempt}: {fault.who} failed after step {fault.step}: {fault.cause}")
        self.log("fault", **fault._asdict(), detection_seconds=round(waited, 4))
        if self.fault is None:  # else the one before is not mended yet
            self.fault, self._at = fault, seen
        self._stopped = time.monotonic()
        return fault

    def goodput(self) -> float:
        """Return the share of the wall time so far that went into steps that count."""
        good, limit = 0.0, float("inf")
        for attempt in reversed(self.attempts):
            done, counted = attempt.last - attempt.first, min(attempt.last, limit) - attempt.first
            if attempt.began and counted > 0:
                good += (attempt.ended - attempt.began) * counted / done
            if attempt.began:
                limit = min(limit, attempt.first)
        return good / max(time.monotonic() - self.began, 1e-9)

    def end(self, code: int, attempt: int) -> None:
        """Print and log the sums."""
        wall = time.monotonic() - self.began
        mean = sum(self.repairs) / len(self.repairs) if self.repairs else None
        goodput = self.goodput()
        if self.restarts or code:
            repair = f"mean time to repair {mean:.1f} s, " if mean is not None else ""
            say(
                f"exit code {code} after {wall:.1f} s: {self.restarts} restarts, {repair}"
                f"{self.steps_lost} steps lost, goodput {goodput:.1%}"
            )
        self.log(
            "end", attempt=attempt, code=code, wall_seconds=round(wall, 3),
            restarts=self.restarts, mttr_seconds=mean and round(mean, 4),
            steps_lost=self.steps_lost, goodput=round(goodput, 4),
        )  # fmt: skip


def say(text: str) -> None:
    """Print a line of the supervisor's."""
    try:
        lines = "\n".join(printable(line) for line in text.split("\n"))
        os.write(2, f"supervise: {lines}\n".encode(errors="replace"))  # one write: lines do not mix
    except OSError:
        return
