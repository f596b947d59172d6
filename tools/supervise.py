#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a node, and start them again after a fault: a launcher like torchrun.

    python tools/supervise.py --nproc-per-node 8 pretrain_llama.py --save DIR --load DIR FLAG...

After a fault (a rank dies, or ends with a code other than 0, 2 and 75) all ranks are ended and
started again, with the same flags, at the newest sound checkpoint: of --load, of --save, or of the
copies in the supervisors' memory (--peer-checkpoint N among the program's flags).

On several nodes one supervisor runs on each. Node 0's decides; the others reach it at
--master-addr:--master-port and prove WEFT_SECRET. In a SLURM step of several nodes the nodes, the
own number and the address are by default SLURM's, MASTER_ADDR's and MASTER_PORT's.

Exit code: 0, all is done; 75, a signal stopped the run; 2, a mistake; 1, a fault that restarts do
not cure; 128+n, signal n came before the first step.
"""

import argparse
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from tools.supervisor.channel import Channel, WireError
from tools.supervisor.copies import Copies, Member
from tools.supervisor.flags import MEET, SIGNALS, Mistake, ignore_signals, parse
from tools.supervisor.follow import Follower
from tools.supervisor.node import Event, Node
from tools.supervisor.report import (
    MISTAKE,
    Attempt,
    End,
    Fault,
    Report,
    alike,
    diagnosis,
    ended_by,
    first_cause,
    say,
    verdict,
)
from training.activity import Activity
from training.faults.admission import Seat

PATIENCE = {"fault": 2.0, "mistake": 12.0, "end": 150.0}  # seconds for the other ranks to end
BEAT = 1.0  # seconds between signs of life
COPY = 120.0  # seconds to bring copies to where they are loaded, or for a dry run


class Stop(Exception):
    """The run ends: args are its exit code and why, or ""."""


class Leader:
    """Node 0's supervisor: it decides where ranks run, when they restart, and when to give up."""

    def __init__(self, options: argparse.Namespace, argv: list[str], secret: bytes) -> None:
        self.options, self.events = options, queue.SimpleQueue[tuple[int, Event]]()
        self.report, self.attempt = Report(options.log_json), -1
        self.members: dict[int, Member] = {}
        self.copies = Copies(self.members)
        self.places: list[tuple[int, int]] = []  # rank: (node, slot)
        self.ends: list[End] = []
        self.killing, self.signalled, self.best = False, 0, -1
        self.streak: list[Fault] = []  # faults since the last new step
        self.failed: list[tuple[int, int]] = []  # their slots
        self.tried: dict[int, int] = {}  # {world: exit code of a dry run}
        self._beat = 0.0
        for number in SIGNALS:
            signal.signal(number, lambda n, _: self.events.put((0, {"signal": n})))
        self.node = Node(
            argv, options, secret, host=options.master_addr, port=options.master_port,
            event=lambda event: self.events.put((0, event)),
            nodes=range(1, options.nnodes), serve=self._serve,
        )  # fmt: skip
        here = options.master_addr, self.node.port, options.nproc_per_node
        self.members[0] = Member(self.node.do, *here)

    def _serve(self, channel: Channel, number: int, seat: Seat) -> None:
        """Listen to another node, in a thread of its own, until it is lost."""
        try:
            me = channel.receive()[0]
            member = Member(channel.send, channel.host, me["port"], me["slots"], channel)
            self.events.put((number, {"joined": member}))
            while True:
                event = channel.receive()[0]
                seat.last_report = time.monotonic()
                if "beat" not in event:
                    self.events.put((number, event))
        except WireError as error:
            self.events.put((number, {"lost": str(error), "channel": channel}))

    def pump(self) -> None:
        """Wait a moment for one event and take note of it; send signs of life."""
        with suppress(queue.Empty):
            self.hear(*self.events.get(timeout=0.1))
        if time.monotonic() - self._beat > BEAT:
            self._beat = time.monotonic()
            self.tell({"beat": True})

    def tell(self, message: Event) -> None:
        """Send a message to all nodes; one that is gone is noticed where it is read."""
        for member in list(self.members.values()):
            with suppress(WireError):
                member.send(message)

    def hear(self, node: int, event: Event) -> None:
        """Take note of an event: those of Node, and a node that joined or was lost, a signal."""
        if "joined" in event:
            self._joined(node, event["joined"])
        elif "lost" in event:
            if node in self.members and self.members[node].channel is event["channel"]:
                del self.members[node]
                say(f"node {node} is lost: {event['lost']}")
                self.copies.lost(node)
                self._lost(node, f"its node was lost: {event['lost']}")
        elif "gone" in event:
            self._lost(node, "the process that started it was killed")
        elif "ended" in event:
            rank, code, cause = event["ended"]
            if event["attempt"] == self.attempt and rank in self.running():
                self.ends.append(End(rank, code, cause, self.killing))
        elif "progress" in event and node == 0 and self.attempt >= 0:
            self.report.progress(event["progress"], self.attempt)
        elif "kept" in event:
            self.copies.copy_made(node, event, self.nodes(), len(self.places))
        elif "fetched" in event:
            self.copies.fetched(node, event)
        elif "dry run" in event:
            self.tried[event["dry run"][0]] = event["dry run"][1]
        elif "signal" in event:
            self.signalled = event["signal"]
            self.tell({"signal": self.signalled})

    def _joined(self, node: int, member: Member) -> None:
        old = self.members.get(node)
        if old and old.channel:  # its connection broke, which was not noticed yet
            old.channel.close()
            self.hear(node, {"lost": "it came anew", "channel": old.channel})
        self.members[node] = member
        say(f"node {node} at {member.host} has places for {member.slots} ranks")

    def _lost(self, node: int, why: str) -> None:
        mine = [rank for rank in self.running() if self.places[rank][0] == node]
        self.ends += [End(rank, None, why, self.killing) for rank in mine]

    def running(self) -> set[int]:
        """Return the ranks that have not ended."""
        return set(range(len(self.places))) - {end.rank for end in self.ends}

    def nodes(self) -> dict[int, list[int]]:
        """Return {node: its ranks}."""
        found: dict[int, list[int]] = {}
        for rank, (node, _) in enumerate(self.places):
            found.setdefault(node, []).append(rank)
        return found

    def place(self) -> None:
        """Decide which slots get the ranks. Raises Stop where too few are left."""
        o, first = self.options, self.attempt < 0
        deadline = time.monotonic() + (MEET if first else o.node_wait)
        needed = o.nnodes * o.nproc_per_node - o.spares
        where = f"{o.master_addr}:{o.master_port}"
        with Activity(tell=say).waiting(
            "waiting for nodes",
            lambda: f"waiting for {self.absent() or 'places'}, to connect to {where}",
            limit=deadline - time.monotonic(),
            over=lambda: "" if self.signalled or self.absent() else "all nodes have connected",
        ):
            free, enough = self._free(first, deadline, needed)
        if self.signalled:
            raise Stop(128 + self.signalled, "")
        self.places = free[: needed if enough else self.smaller(len(free), needed)]

    def absent(self) -> str:
        """Return "node 2" or "nodes 1, 2": those that have not connected, or are lost; or ""."""
        late = [str(n) for n in range(self.options.nnodes) if n not in self.members]
        return f"node{'s' if len(late) > 1 else ''} {', '.join(late)}" if late else ""

    def _free(
        self, first: bool, deadline: float, needed: int
    ) -> tuple[list[tuple[int, int]], bool]:
        """Return the slots that may get ranks, and whether they are enough before the deadline."""
        o = self.options
        bad = {slot for slot in self.failed if self.failed.count(slot) >= max(2, o.crash_loop - 1)}
        free = list[tuple[int, int]]()
        while not self.signalled:
            every = [(n, i) for n in sorted(self.members) for i in range(self.members[n].slots)]
            free = [slot for slot in every if slot not in bad or not (o.spares or o.elastic_dp)]
            if len(free) >= needed and (not first or len(self.members) == o.nnodes):
                return free, True
            if time.monotonic() > deadline or len(every) >= needed > len(free):
                break
            self.pump()
        return free, False

    def _until(self, done: Callable[[], bool], what: str) -> None:
        """Pump events until this is done, a signal comes or COPY seconds are over."""
        deadline = time.monotonic() + COPY
        with Activity(tell=say).waiting(
            what, lambda: f"waiting for {what}", limit=COPY, over=lambda: f"{what}: over"
        ):
            while not done() and time.monotonic() < deadline and not self.signalled:
                self.pump()

    def smaller(self, free: int, needed: int) -> int:
        """Return the largest world that the program accepts. Raises Stop."""
        left = f"{free} of the {needed} places for ranks are left"
        if not self.options.elastic_dp or self.attempt < 0:
            late = f" ({absent} is missing)" if (absent := self.absent()) else ""
            raise Stop(1, f"{left}; with --elastic-dp the run would continue{late}")
        for world in range(min(free, needed), self.options.min_nproc - 1, -1):
            if world not in self.tried:
                self.node.do({"try": world})
            self._until(partial(self.tried.__contains__, world), f"a dry run of {world} ranks")
            if self.tried.get(world) == 0:
                say(f"{left}: continuing with {world} ranks")
                return world
        fits = f"no world of {self.options.min_nproc} to {free} ranks"
        raise Stop(1, f"{left}, and the flags fit {fits}")

    def restore(self) -> int | None:
        """Bring the newest copy in memory to the nodes that load it; return its step, or None."""
        while (step := self.copies.choose(self.nodes(), len(self.places))) is not None:
            self._until(lambda: not self.copies.waiting, f"nodes that copy step {step} in memory")
            if self.copies.only(step):
                return step
            self.copies.drop(step)
        self.copies.only(-1)
        return None

    def start(self, copy: int | None) -> None:
        """Start an attempt."""
        self.attempt += 1
        self.ends, self.killing = [], False
        self.report.attempts.append(Attempt())
        with socket.socket() as probe:  # a port of its own for each attempt
            probe.bind((self.options.master_addr, 0))
            port = probe.getsockname()[1]
        for node, ranks in self.nodes().items():
            plan = {
                "attempt": self.attempt, "world": len(self.places), "first": ranks[0],
                "slots": [self.places[rank][1] for rank in ranks],
                "host": self.options.master_addr, "port": port,
            }  # fmt: skip
            if node not in self.members:
                self._lost(node, "its node was lost")
                continue
            with suppress(WireError):
                self.members[node].send({"start": plan})
        self.report.log(
            "start", attempt=self.attempt, world=len(self.places), nodes=sorted(self.nodes()),
            port=port, copy=copy,
        )  # fmt: skip

    def watch(self) -> tuple[int | None, float]:
        """Wait for the end of all ranks; return the verdict, and when the first fault was seen.

        Once a rank has ended, the others have PATIENCE to say why, and are killed.
        """
        kind, seen = "", 0.0
        while self.running():
            self.pump()
            if self.ends:
                mistake = any(end.code == MISTAKE for end in self.ends)
                faulty = any(end.fault for end in self.ends)
                now = "fault" if faulty else "mistake" if mistake else "end"
                if now != kind:
                    kind, seen = now, time.monotonic()
                if time.monotonic() > seen + PATIENCE[kind] and not self.killing:
                    self.killing = True
                    self.tell({"signal": int(signal.SIGKILL)})
        return verdict(self.ends), seen or time.monotonic()

    def examine(self, seen: float) -> None:
        """Return if the ranks are to be restarted after a fault. Raises Stop otherwise."""
        o, report = self.options, self.report
        if self.signalled:
            raise Stop(ended_by(self.signalled, self.ends), "")
        rank, cause = first_cause(self.ends)
        slot = self.places[rank] if rank < len(self.places) else (0, 0)
        same = alike(self.ends)
        fault = report.failed(self.attempt, rank, slot[0], cause, seen, same)
        if report.best > self.best:
            self.best, self.streak, self.failed = report.best, [], []
        self.streak.append(fault)
        if not same:  # else no place is to blame
            self.failed.append(slot)
        if len(self.streak) >= o.crash_loop:
            raise Stop(1, diagnosis(self.streak))
        if report.restarts >= o.max_restarts:
            raise Stop(1, f"--max-restarts {o.max_restarts}: the ranks are not started again")
        report.restarts += 1

    def run(self) -> int:
        """Start ranks until they end well, or for good; return the exit code."""
        code = 1
        try:
            while True:
                self.place()
                self.start(self.restore() if self.attempt >= 0 else None)
                end, seen = self.watch()
                if end is not None:
                    code = end
                    return code
                self.examine(seen)
        except Stop as stop:
            code, why = stop.args
            if why:
                say(why)
            return code
        finally:
            ignore_signals()
            self.report.end(code, self.attempt)
            self.tell({"end": code})
            self.node.close()


def main(words: list[str] | None = None) -> int:
    """Read the flags and supervise; return the exit code."""
    try:
        options, secret = parse(words, __doc__)
        if "--dry-run" in options.flags:  # of the whole run: nothing to supervise
            os.execv(sys.executable, [sys.executable, options.script, *options.flags])
        kind = Follower if options.node_rank else Leader
        return kind(options, [options.script, *options.flags], secret).run()
    except Mistake as error:
        say(str(error))
    except OSError as error:  # the address is not this machine's, or taken
        say(f"--master-addr, --master-port: {error}")
    return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
