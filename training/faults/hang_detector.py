# SPDX-License-Identifier: Apache-2.0
"""Decide which rank hangs, from the reports of all ranks: the one that all others wait for.

A rank that makes no progress and waits for no other rank hangs. If every rank waits, the rank that
is missing in the others' waits hangs: a collective has a number on its axis, and a rank that has
not started that number is missing; a message has one sender. Ranks that wait for one another in a
cycle are reported together.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpu.comm.waits import Wait
from training.faults.activity import say
from training.faults.hang_watch import HangWatch
from training.faults.process import Process
from training.faults.store import spans

TURNS = 4  # looks a second
MOST = 3  # places in one line, at most
TOGETHER = 1.0  # seconds: ranks that get stuck in one action within this time hang together
MOVING = 2.0  # seconds: a rank with progress within this time does not hang
WHERE = {
    "data": "in the data loader",
    "checkpoint": "in a checkpoint's files",
    "evaluation": "computing",
    "compute": "computing",
    "set-up": "in set-up",
    "communication": "in communication, but not waiting for a peer",
}


@dataclass
class Status:
    """The status of a rank. stuck: seconds without progress. unsure: seconds by which it may be
    longer, as an action is seen only at the first beat after it began.

    The other fields are those of HangWatch.status; all are set once a rank makes no progress.
    """

    rank: int
    action: str
    phase: str = ""
    stuck: float = 0.0
    unsure: float = 0.0
    limit: float | None = None
    wait: Wait | None = None
    started: dict[str, int] = field(default_factory=dict)
    kind: str = ""
    line: str = ""

    @classmethod
    def of(cls, rank: int, action: str, fields: dict[str, Any], silent: float) -> "Status":
        """Return the status of a rank that sent these fields `silent` seconds ago."""
        wait, limit = fields.get("wait"), fields.get("limit")
        return cls(
            rank,
            action,
            phase=str(fields.get("phase", "")),
            stuck=float(fields.get("stuck", 0.0)) + silent,
            unsure=float(fields.get("unsure", 0.0)),
            limit=None if limit is None else float(limit),
            wait=None if not wait else Wait.packed(wait),
            started=dict(fields.get("started", {})),
            kind=str(fields.get("kind", "")),
            line=str(fields.get("line", "")),
        )


@dataclass(frozen=True)
class Hang:
    """The ranks that hang, first the one that hung first, and the sentence about it."""

    ranks: tuple[int, ...]
    action: str
    text: str
    stuck: float


class HangDetector:
    """Collect the reports of all ranks; report a hang once, and determine when it ends the run.

    deadline: seconds without progress after which the run ends in any phase; hang_timeout: after
    set-up (None: the deadline). place: where this process is, in JSON.
    """

    def __init__(self, deadline: float, hang_timeout: float | None, place: str = "{}") -> None:
        self.deadline, self.hang_timeout, self.place = deadline, hang_timeout, place
        self._fields: dict[int, dict[str, Any]] = {}
        self._places: dict[int, str] = {}
        self._reported: set[int] = set()  # ranks reported as hanging, until they make progress
        self._looked = 0.0

    def hear(self, rank: int, kind: str, text: str) -> None:
        """Store a rank's status or place, in JSON."""
        if kind == "place":
            self._places[rank] = text
        else:
            self._fields[rank] = json.loads(text)

    def look(self, reports: list[tuple[int, str, float]], now: float) -> tuple[Hang | None, bool]:
        """Return a hang to report, if any, and whether it ends the run.

        reports: each rank, its action, and the seconds since its last report. now:
        time.monotonic(). Looks TURNS times a second at most, less in a large world.
        """
        if now - self._looked < max(1, len(reports) / 512) / TURNS:
            return None, False
        self._looked, ranks = now, self._statuses(reports)
        self._reported &= {s.rank for s in ranks if s.stuck >= MOVING}
        over = [s for s in ranks if s.stuck > self._end(s)]
        late = [s for s in ranks if s.limit is not None and s.stuck > s.limit]
        hang = find(ranks) if over or late else None
        if hang is None:
            return None, False
        if hang.stuck > self._end(next(s for s in ranks if s.rank == hang.ranks[0])):
            return hang, True
        least = min((s.limit for s in late if s.limit is not None), default=math.inf)
        if hang.stuck < least - MOVING or self._reported & set(hang.ranks):
            return None, False
        self._reported |= set(hang.ranks)
        return hang, False

    def find(self, reports: list[tuple[int, str, float]]) -> Hang | None:
        """Return the ranks that hang now, if any, whatever their limits."""
        return find(self._statuses(reports))

    def elsewhere(self, reports: list[tuple[int, str, float]]) -> str:
        """Return words on the ranks that rank 0 waits for, or that are not where it is, or ""."""
        return elsewhere(self._statuses(reports))

    def why_silent(self, rank: int, otherwise: str) -> tuple[str, str]:
        """Return why a rank is silent, as far as this host can tell, and its process's place."""
        place = self._places.get(rank, "")
        return silence(json.loads(place or "{}"), otherwise), place

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank's process has ended, as far as this host can tell."""
        return Process(json.loads(self._places.get(rank, "") or "{}")).gone

    def patience(self, rank: int, silence: float) -> float:
        """Return the seconds of silence after which a rank counts as lost. silence: in set-up."""
        if self._fields.get(rank, {}).get("phase", "set-up") == "set-up":
            return silence
        return self.shortest(silence)

    def shortest(self, silence: float) -> float:
        """Return the same seconds for a rank after set-up."""
        return min(silence, self.hang_timeout or silence)

    def _statuses(self, reports: list[tuple[int, str, float]]) -> list[Status]:
        none: dict[str, Any] = {}
        return [
            Status.of(r, action, self._fields.get(r, none), gone) for r, action, gone in reports
        ]

    def _end(self, status: Status) -> float:
        if self.hang_timeout is None or status.phase in ("", "set-up"):
            return self.deadline
        return min(self.hang_timeout, self.deadline)


def find(ranks: Sequence[Status]) -> Hang | None:
    """Return the ranks that hang, None if the rank that the others wait for makes progress."""
    still = [s for s in ranks if s.stuck >= MOVING]
    if not still:
        return None
    alone = [s for s in ranks if s.wait is None]
    loose = [s for s in alone if s.kind != "communication"] or alone
    if loose:
        first = max(loose, key=lambda s: s.stuck)
        if first.stuck < MOVING or first.stuck < max(s.stuck for s in still) - MOVING:
            return None
        group = [
            s
            for s in loose
            if s.action == first.action and first.stuck - s.stuck < TOGETHER + s.unsure
        ]
    else:
        here = {s.rank: s for s in ranks}
        group = _end_of_chain(still, here)
        if not missing(group[0], here):  # a collective that all have entered, the last one when?
            peers = group[0].wait.peers if group[0].wait else ()
            since = min(here[r].stuck for r in {*peers, group[0].rank} & here.keys())
            if since < MOVING:
                return None
            group = [replace(group[0], stuck=since)]
    return Hang(
        tuple(s.rank for s in group), group[0].action, _sentence(group, ranks), group[0].stuck
    )


def elsewhere(ranks: Sequence[Status]) -> str:
    """Return "rank 3 is at: saving (training/checkpoint/save.py:99 (save))" for the ranks that rank
    0 waits for; if it waits for none, for those that are at another place.
    """
    here = {s.rank: s for s in ranks}
    mine = here.get(0)
    if mine is None:
        return ""
    loose = [s for s in ranks if s.rank and s.wait is None]
    if mine.wait is not None:
        late = [s for s in missing(mine, here) if s.wait is None] or loose
    else:
        late = [s for s in loose if s.action != mine.action or s.line and mine.line != s.line]
    groups: dict[tuple[str, str], list[int]] = {}
    for s in late:
        groups.setdefault((s.action, s.line), []).append(s.rank)
    texts = []
    for (action, line), group in list(groups.items())[:MOST]:
        verb = "is" if len(group) == 1 else "are"
        texts.append(f"{spans(group)} {verb} at: {action}" + (f" ({line})" if line else ""))
    more = len(late) - sum(map(len, list(groups.values())[:MOST]))
    text = ", ".join(texts) + (f", {more} more elsewhere" if more else "")
    return f"waiting for others: {text}" if late and mine.wait is not None else text


def missing(waiter: Status, ranks: dict[int, Status]) -> list[Status]:
    """Return the peers that this rank waits for and that have not arrived yet."""
    if waiter.wait is None:
        return []
    _, axis, peers, number = waiter.wait
    others = [ranks[r] for r in peers if r != waiter.rank and r in ranks]
    if number == 0:
        return others
    return [s for s in others if s.started and s.started.get(axis, 0) < number]


def _end_of_chain(still: Sequence[Status], ranks: dict[int, Status]) -> list[Status]:
    """Follow the chain of waits from the rank stuck longest; return its end, or its cycle."""
    path = [max(still, key=lambda s: s.stuck)]
    while absent := missing(path[-1], ranks):
        following = max(absent, key=lambda s: s.stuck)
        if following in path:
            return path[path.index(following) :]
        path.append(following)
    return path[-1:]


def _sentence(group: Sequence[Status], ranks: Sequence[Status]) -> str:
    first, inside = group[0], {s.rank for s in group}
    everyone = len(group) == len(ranks) > 1
    subject = spans(sorted(inside)) + ", which is every rank," * everyone
    verb = "hangs" if len(group) == 1 else "hang"
    limit = f" (limit {first.limit:.0f} s)" if first.limit is not None else ""
    phase = f" in the phase {first.phase}:" if first.phase else ""
    words = f"{subject} {verb}{phase} {where(first, ranks)}, for {first.stuck:.1f} s{limit}"
    waiting = [s for s in ranks if s.wait is not None and s.rank not in inside]
    if waiting:
        one = waiting[0]
        verb = "waits" if len(waiting) == 1 else "wait"
        words += f"; {spans(sorted(s.rank for s in waiting))} {verb} in {_of(one.wait)}"
    return words


def where(status: Status, ranks: Sequence[Status] = ()) -> str:
    """Return where a rank is: "in the data loader at training/data/loader.py:73 (f)"."""
    line = f" at {status.line}" if status.line else ""
    if status.wait is None:
        return WHERE.get(status.kind, "computing") + line
    absent = missing(status, {s.rank: s for s in ranks})
    who = spans(sorted(s.rank for s in absent)) if absent else ""
    why = (
        f"which {who} never entered"
        if absent
        else "which every rank has entered and which does not complete"
    )
    if status.wait.number == 0:
        why = f"which has not come from {who or spans(sorted(status.wait.peers))}"
    return f"in {_of(status.wait)}, {why},{line}"


def _of(wait: Wait | None) -> str:
    assert wait is not None
    return (
        f"{wait.verb} {wait.number} over {wait.axis}"
        if wait.number
        else (f"a {wait.verb} over {wait.axis}")
    )


def silence(place: dict[str, Any], otherwise: str) -> str:
    """Return why a rank sends no heartbeat, as far as this host can tell; else `otherwise`.

    place: of its process.
    """
    process = Process(place)
    state, lines = process.state(), process.lines()
    if state in ("T", "t"):
        why = "its process is stopped (SIGSTOP?)"
    elif state and lines:
        why = (
            "its process is alive but its Python interpreter is blocked (a library holds the GIL)"
        )
    elif state:
        why = "its process is alive but sends nothing"
    else:
        return otherwise
    return f"{why} at {lines[0]}" if lines else why


def watch_alone(
    watch: HangWatch,
    detector: HangDetector,
    action: Callable[[], str],
    ended: threading.Event,
    beat: float,
) -> Hang | None:
    """Watch the only rank of a world until it has `ended`; return the hang that ends the run."""
    watch.arm(0.0, several=False)
    while not ended.wait(beat):
        watch.arm(0.0, several=False)
        detector.hear(0, "status", json.dumps(watch.status(action(), beat)))
        hang, ends = detector.look([(0, action(), 0.0)], time.monotonic())
        if ends:
            return hang
        if hang is not None:
            say(f"[rank 0] {hang.text}\n{watch.stacks()}")
    return None
