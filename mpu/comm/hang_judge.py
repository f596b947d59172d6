# SPDX-License-Identifier: Apache-2.0
"""Decide which rank hangs, from what all ranks say of themselves: the one that all others wait for.

A rank that stands still and waits for nobody hangs. Where every rank waits, the one that the others
miss does: a collective has a number on its axis, and a rank that has not started that number is not
there; a message has one sender. Ranks that wait for one another in a circle are named together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpu.comm.process_state import Process
from mpu.comm.waits import Wait

TOGETHER = 1.0  # seconds: ranks that stopped at one action within this hang together
MOVING = 2.0  # seconds: what moved within them does not hang
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
    """What the hub knows of a rank. stuck: seconds without movement. silent: without a word.

    address: of its process (mpu/comm/process_state.py). words: how it stands, instead of WHERE.
    """

    rank: int
    action: str
    phase: str = ""
    stuck: float = 0.0
    silent: float = 0.0
    limit: float | None = None
    wait: Wait | None = None
    started: dict[str, int] = field(default_factory=dict)
    kind: str = ""
    line: str = ""
    address: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rank: int, action: str, said: dict[str, Any], silent: float, address: dict[str, Any]
    ) -> "Status":
        """Return the status of a rank that said this `silent` seconds ago."""
        wait, limit = said.get("wait"), said.get("limit")
        return cls(
            rank,
            action,
            str(said.get("phase", "")),
            float(said.get("stuck", 0.0)) + silent,
            silent,
            None if limit is None else float(limit),
            None if not wait else Wait.packed(wait),
            dict(said.get("started", {})),
            str(said.get("kind", "")),
            str(said.get("line", "")),
            address,
        )


@dataclass(frozen=True)
class Hang:
    """The ranks that hang, the first of them first, and the sentence about it."""

    ranks: tuple[int, ...]
    action: str
    text: str
    stuck: float


class HangJudge:
    """Look at the ranks at each turn of the hub; name a hang once, and end the run in time.

    deadline, hang_timeout: as HangWatch has them.
    """

    def __init__(self, deadline: float, hang_timeout: float | None) -> None:
        self.deadline, self.hang_timeout = deadline, hang_timeout
        self._told: set[int] = set()  # ranks of which a report was made, until they move

    def look(self, ranks: Sequence[Status]) -> tuple[Hang | None, bool]:
        """Return a hang to speak of, if any, and whether it ends the run."""
        self._told &= {s.rank for s in ranks if s.stuck >= MOVING}
        over = [s for s in ranks if s.stuck > self._end(s)]
        late = [s for s in ranks if s.limit is not None and s.stuck > s.limit]
        if not over and not late:
            return None, False
        hang = find(ranks)
        if hang is None:
            return None, False
        first = next(s for s in ranks if s.rank == hang.ranks[0])
        if hang.stuck > self._end(first):
            return hang, True
        if self._told & set(hang.ranks) or not late:
            return None, False
        self._told |= set(hang.ranks)
        return hang, False

    def _end(self, status: Status) -> float:
        if self.hang_timeout is None or status.phase in ("", "set-up"):
            return self.deadline
        return min(self.hang_timeout, self.deadline)


def find(ranks: Sequence[Status]) -> Hang | None:
    """Return the ranks that hang, None where what the others wait for still moves."""
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
            if s.action == first.action and abs(s.stuck - first.stuck) < TOGETHER
        ]
    else:
        group = _end_of_chain(still, {s.rank: s for s in ranks})
    return Hang(
        tuple(s.rank for s in group), group[0].action, _sentence(group, ranks), group[0].stuck
    )


def missing(waiter: Status, ranks: dict[int, Status]) -> list[Status]:
    """Return the peers that this rank's wait needs and that are not there yet."""
    if waiter.wait is None:
        return []
    _, axis, peers, number = waiter.wait
    others = [ranks[r] for r in peers if r != waiter.rank and r in ranks]
    if number == 0:
        return others
    return [s for s in others if s.started and s.started.get(axis, 0) < number]


def _end_of_chain(still: Sequence[Status], ranks: dict[int, Status]) -> list[Status]:
    """Follow who waits for whom from the rank that stands longest; return who stands at the end."""
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
    subject = f"{named([s.rank for s in group])}, which is every rank," if everyone else (
        named([s.rank for s in group])
    )
    verb = "hangs" if len(group) == 1 else "hang"
    limit = f" (limit {first.limit:.0f} s)" if first.limit is not None else ""
    words = f"{subject} {verb} {stands(first, ranks)}, for {first.stuck:.1f} s{limit}"
    waiting = [s for s in ranks if s.wait is not None and s.rank not in inside]
    if waiting:
        one = waiting[0]
        verb = "waits" if len(waiting) == 1 else "wait"
        words += f"; {named([s.rank for s in waiting])} {verb} in {_of(one.wait)}"
    return words


def stands(status: Status, ranks: Sequence[Status] = ()) -> str:
    """Return where a rank stands: "in the data loader at training/data/loader.py:73 (f)"."""
    line = f" at {status.line}" if status.line else ""
    if status.wait is None:
        return WHERE.get(status.kind, "computing") + line
    absent = missing(status, {s.rank: s for s in ranks})
    who = named([s.rank for s in absent]) if absent else ""
    why = f"to which {who} never came" if absent else "in which every rank is, without an end"
    if status.wait.number == 0:
        why = f"which does not come from {who or named(list(status.wait.peers))}"
    return f"in {_of(status.wait)}, {why},{line}"


def _of(wait: Wait | None) -> str:
    assert wait is not None
    return f"{wait.verb} {wait.number} over {wait.axis}" if wait.number else (
        f"a {wait.verb} over {wait.axis}"
    )


def silence(address: dict[str, Any], last: str) -> tuple[str, str]:
    """Return why a rank gives no sign of life, as far as its host tells, and the line it is at.

    last: the line that it said last.
    """
    process = Process(address)
    state = process.state()
    if state in ("T", "t"):
        return "its process is stopped (SIGSTOP?)", last
    lines = process.lines()
    if state and lines:
        return "its process lives but its Python stands still (a library holds its lock)", lines[0]
    if state:
        return "its process lives but says nothing", last
    return "", last


def named(ranks: list[int]) -> str:
    """Return "rank 3", "ranks 0 and 1", or "ranks 0, 1, 2 and 5 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f"{len(ranks) - 3} more" if len(ranks) > 3 else str(ranks[-1])
    shown = ranks[:3] if len(ranks) > 3 else ranks[:-1]
    return f"ranks {', '.join(map(str, shown))} and {more}"
