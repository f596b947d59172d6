# SPDX-License-Identifier: Apache-2.0
"""Kill a run again and again, and start it again each time as a launcher would.

Each kill is drawn from a seed beforehand: the step, the rank or all ranks, and the moment (at a
call inside of a step, in a phase of a save, or by a timer, independent of both). The command never
changes. Three things are measured: the time until the first new step is done, how many steps were
lost, and the share of the time that went into steps that count.
"""

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.small_run import Ranks
from tests.launcher import Launcher, Result

ALL = -1
IN_STEP = {  # point: at most this call of an iteration
    "data": 1,
    "layer": 4,
    "backward": 10,
    "gradient sums": 1,
    "update": 1,
}
MESSAGES = {"receive": 4, "wait": 4, "send": 4}  # of a pipeline
PHASES = {"start": 1, "piece": 10, "shards": 1, "manifest": 1, "renamed": 1}
RANK_0 = ("manifest", "renamed", "pruning", "trash")
TIMERS = ("after a step", "after the start")


@dataclass(frozen=True)
class Kill:
    """One kill. step: the earliest iteration at which it strikes; timers: seconds from then (or
    from the start of all processes)."""

    step: int
    rank: int
    where: str
    call: int = 1
    seconds: float = 0.0

    def fault(self) -> dict[str, Any] | None:
        """Say it to run_ranks.py; timers are ours."""
        if self.where in TIMERS:
            return None
        how = "kill all" if self.rank == ALL else "kill"
        where = {"point": self.where, "call": self.call, "from": self.step}
        return where | {"rank": max(self.rank, 0), "how": how}


def draw(seed: int, kills: int, steps: int, ranks: int, flags: str = "") -> list[Kill]:
    """Draw the kills of a run, in the order of their steps, all of them before the last step.

    flags: of the run; what only some of them lead through is drawn for these alone.
    """
    rng = random.Random(seed)
    points = IN_STEP | (MESSAGES if "--pipeline" in flags else {})
    points |= {"staging": 1, "staged": 1} if "--async-save" in flags else {}
    phases = PHASES | ({"pruning": 1, "trash": 1} if "--keep-last-k" in flags else {})
    drawn = []
    for step in sorted(rng.sample(range(1, steps - 10), kills)):
        rank, kind = rng.choice((ALL, *range(ranks))), rng.random()
        if kind < 0.4:
            where = rng.choice(list(points))
            drawn.append(Kill(step, rank, where, rng.randint(1, points[where])))
        elif kind < 0.7:
            phase = rng.choice(list(phases))
            call = rng.randint(1, phases[phase])
            drawn.append(Kill(step, 0 if phase in RANK_0 and rank > 0 else rank,
                              f"save: {phase}", call))  # fmt: skip
        elif kind < 0.9:
            drawn.append(Kill(step, rank, TIMERS[0], seconds=rng.uniform(0, 0.1)))
        else:  # a rank that dies alone before it has met the others is its launcher's business
            drawn.append(Kill(step, ALL, TIMERS[1], seconds=rng.uniform(0, 0.6)))
    return drawn


@dataclass
class Report:
    """The cost of the kills, in seconds; a start is a fork here, so add what importing takes."""

    kills: int = 0
    recoveries: list[float] = field(default_factory=list)  # from a kill to the first new step done
    lost: list[int] = field(default_factory=list)  # steps done before a kill and again after it
    wall: float = 0.0  # from the first start to the end
    useful: float = 0.0  # that the steps take when nobody disturbs
    exits: list[float] = field(default_factory=list)  # from a kill to the last survivor's end

    def __str__(self) -> str:
        mean = sum(self.recoveries) / len(self.recoveries)
        return (
            f"{self.kills} kills: mean time to recover {mean:.2f} s "
            f"(longest {max(self.recoveries):.2f}), survivors gone after at most "
            f"{max(self.exits):.2f} s; steps lost {sum(self.lost)} "
            f"(mean {sum(self.lost) / self.kills:.2f}, most {max(self.lost)}); goodput "
            f"{100 * self.useful / self.wall:.0f}%, {self.useful:.1f} s of steps in "
            f"{self.wall:.1f} s"
        )


class Log:
    """The iterations in a JSON log that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.count, self.last = path, 0, 0

    def poll(self) -> int:
        """Return how many steps have been added since the last call."""
        rows = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        steps = [row for row in rows if '"loss"' in row]
        new, self.count = len(steps) - self.count, len(steps)
        if steps:
            self.last = int(steps[-1].partition('"iteration":')[2].partition(",")[0])
        return new


class RepeatedKills:
    """Kills one run, `command` for Ranks.start, in one folder."""

    def __init__(self, ranks: Ranks, command: dict[str, Any], kills: list[Kill]) -> None:
        self.ranks, self.command, self.kills = ranks, command, kills
        self.report, self.folder = Report(), None
        self.result: Result | None = None
        self.log: Log | None = None
        self.killed_at: float | None = None

    def run(self) -> Report:
        """Let it happen; afterwards `result` is the run that came to its end."""
        began = time.monotonic()
        for kill in [*self.kills, None]:
            self.result = self.attempt(kill)
            if kill is None:
                break
            victims = range(len(self.result.codes)) if kill.rank == ALL else [kill.rank]
            codes = self.result.codes
            assert all(codes[v] == -signal.SIGKILL for v in victims), (kill, self.words())
            assert all(code in (1, -signal.SIGKILL) for code in codes), (kill, self.words())
            assert self.result.orphans() == []
            self.report.kills += 1
        self.report.wall = time.monotonic() - began
        return self.report

    def words(self) -> list[str]:
        return [self.result.said(rank) for rank in range(len(self.result.codes))]

    def attempt(self, kill: Kill | None) -> Result:
        """Start the command, see its first step, kill what is to be killed, wait for all."""
        launcher: Launcher = self.ranks.launcher
        fault = kill.fault() if kill else None
        self.folder = self.ranks.start(fault=fault, folder=self.folder, **self.command)
        start, done_before = time.monotonic(), self.log.last if self.log else 0
        self.log = self.log or Log(self.folder / "log.jsonl")
        struck: float | None = None
        due: float | None = None
        first = 0
        while not launcher.over(0.004):
            steps, now = self.log.poll(), time.monotonic()
            if steps and not first:
                first = self.log.last - steps + 1
                self.recovered(now, done_before - first + 1)
            if kill is None or fault is not None or struck is not None:
                continue
            pids = self.pids()
            ready = kill.where == TIMERS[1] or (first and self.log.last >= kill.step)
            if due is None and ready and len(pids) == self.command["ranks"]:
                due = now + kill.seconds
            if due is not None and now >= due:
                for pid in pids if kill.rank == ALL else [pids[kill.rank]]:
                    os.kill(pid, signal.SIGKILL)
                struck = time.monotonic()
        result = launcher.wait()
        steps = self.log.poll()
        if steps and not first:
            self.recovered(start + max(result.ended), done_before - (self.log.last - steps))
        if kill is not None:
            dead = [r for r, code in enumerate(result.codes) if code == -signal.SIGKILL]
            at = struck or start + min((result.ended[r] for r in dead), default=0.0)
            self.killed_at = self.killed_at or at
            self.report.exits.append(start + max(result.ended) - at)
        return result

    def recovered(self, now: float, lost: int) -> None:
        """Note the first step after a kill (or after several that let none be done)."""
        if self.killed_at is not None:
            self.report.recoveries.append(now - self.killed_at)
            self.report.lost.append(lost)
        self.killed_at = None

    def pids(self) -> list[int]:
        found = []
        for rank in range(self.command["ranks"]):
            with suppress(OSError, ValueError):
                found.append(int((self.folder / f"pid.{rank}").read_text()))
        return found
