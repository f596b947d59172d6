# SPDX-License-Identifier: Apache-2.0
"""Decide which node's memory holds which copy of the run's state: for tools/supervise.py.

A copy of a step is a checkpoint whose files lie on the nodes whose ranks wrote them, and once more
on the next node of the ring, which fetched them. It is safe when all of that is done; then older
ones are removed. After a fault the newest copy of which every file is somewhere is brought to where
it will be loaded: a node fetches only what it lacks.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.supervisor.channel import Channel, WireError
from tools.supervisor.node import Event

ALL = 1 << 62  # later than any step


@dataclass
class Member:
    """A node as the leader knows it. slots: places for ranks. holds: {step: files in its memory}"""

    send: Callable[[Event], None]
    host: str
    port: int
    slots: int
    channel: Channel | None = None
    copies: dict[int, set[str]] = field(default_factory=dict)


class Copy(NamedTuple):
    """Files of one step, on whatever node. needs: {rank: those that it loads}, in this world.

    makers: the nodes whose ranks wrote it.
    """

    files: set[str]
    needs: dict[str, list[str]]
    world: int
    makers: tuple[int, ...]


class Copies:
    """What the members hold, and orders to them. waiting: nodes that have not answered yet.

    One step at a time is under way to other nodes.
    """

    def __init__(self, members: dict[int, Member]) -> None:
        self.members, self.waiting = members, set[int]()
        self._copies: dict[int, Copy] = {}
        self._moving = -1  # the step under way to other nodes
        self._tried = -1  # the newest step that was
        self._restoring = False

    def copy_made(self, node: int, event: Event, makers: Iterable[int], world: int) -> None:
        """A node's ranks made a copy."""
        step = event["kept"]
        if node in self.members:
            self._undone(step)
            files, needs = set(event["files"]), event["needs"]
            self._copies[step] = Copy(files, needs, world, tuple(makers))
            self.members[node].copies[step] = set(event["have"])
            self._spread()

    def _undone(self, step: int) -> None:
        """Forget steps after one that is made now: the run went back."""
        if later := [other for other in self._copies if other > step]:
            self._forget(lambda other: other in later)
            self._tell([0, step])
            self._tried = -1
            if self._moving in later:
                self._moving, self.waiting = -1, set()

    def fetched(self, node: int, event: Event) -> None:
        """A node has what it was asked to fetch, or failed to."""
        step = event["fetched"]
        if node in self.members and step == self._moving:
            if event["have"] is not None:
                self.members[node].copies[step] = set(event["have"])
                self.waiting.discard(node)
            elif self._restoring:
                self.drop(step)
            else:  # the next copy may come through
                self._moving = -1
            self._arrived()

    def lost(self, node: int) -> None:
        """A node is gone."""
        self.waiting.discard(node)
        self._arrived()

    def _spread(self) -> None:
        """Let each node fetch another's files of the newest step that all makers have."""
        made = [
            step
            for step, copy in self._copies.items()
            if all(n in self.members and step in self.members[n].copies for n in copy.makers)
        ]
        step = max(made, default=-1)
        if self._moving >= 0 or step <= self._tried:
            return
        ring = sorted(self.members)
        self._moving = self._tried = step
        self.waiting, self._restoring = set(ring), False
        for here, there in zip(ring, ring[1:] + ring[:1], strict=True):
            names = self.members[here].copies.get(step, set())
            self._order(there, step, {here: names} if names and here != there else {})

    def _arrived(self) -> None:
        """Remove older copies once the one under way is where it belongs."""
        if self._moving >= 0 and not self.waiting and not self._restoring:
            step, self._moving = self._moving, -1
            if self._somewhere(step):
                self._tell([step, ALL])
                self._forget(lambda old: old < step)
        self._spread()

    def _somewhere(self, step: int) -> bool:
        """Return whether each file of a step is on a node that lives."""
        names = (member.copies.get(step, set()) for member in self.members.values())
        return self._copies[step].files <= set().union(*names)

    def choose(self, ranks: dict[int, list[int]], world: int) -> int | None:
        """Order the newest copy that can be loaded to the nodes of these ranks; return its step.

        It is there once `waiting` is empty. None: there is no copy.
        """
        self._moving, self.waiting, self._restoring = -1, set(), True
        for step in sorted(self._copies, reverse=True):
            copy = self._copies[step]
            of_nodes = {n: m.copies.get(step, set()) for n, m in self.members.items()}
            if self._somewhere(step):
                for node in ranks.keys() & of_nodes.keys():
                    need = {n for n in copy.files if not n.endswith(".safetensors")}
                    if world == copy.world:
                        of_ranks = [copy.needs.get(str(r), copy.files) for r in ranks[node]]
                        need = need.union(*of_ranks)
                    else:  # another layout: any rank may need any file
                        need |= copy.files
                    need -= of_nodes[node]
                    sources = {}
                    for other, names in of_nodes.items():
                        sources[other] = need & names
                        need = need - names
                    if any(sources.values()):
                        self.waiting.add(node)
                        self._order(node, step, {n: s for n, s in sources.items() if s})
                self._moving = step
                return step
        return None

    def only(self, step: int) -> bool:
        """Remove all copies but that of this step (-1: all), if it is where it is needed."""
        if self.waiting or (step >= 0 and step not in self._copies):
            return False
        self._tell([step, step] if step >= 0 else [ALL, ALL])
        self._forget(lambda other: other != step)
        self._moving, self._tried, self._restoring = -1, step, False
        return True

    def drop(self, step: int) -> None:
        """Count a copy as lost."""
        self._forget(lambda other: other == step)
        self.waiting.clear()

    def _order(self, node: int, step: int, sources: dict[int, set[str]]) -> None:
        places = [
            [self.members[n].host, self.members[n].port, sorted(s)] for n, s in sources.items()
        ]
        with suppress(WireError):
            self.members[node].send({"fetch": {"step": step, "from": places}})

    def _tell(self, span: list[int]) -> None:
        """Let all members remove the copies outside of a span of steps, its ends included."""
        for member in self.members.values():
            with suppress(WireError):
                member.send({"forget": span})

    def _forget(self, doomed: Callable[[int], bool]) -> None:
        for step in [step for step in self._copies if doomed(step)]:
            del self._copies[step]
            for member in self.members.values():
                member.copies.pop(step, None)
