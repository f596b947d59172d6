# SPDX-License-Identifier: Apache-2.0
"""Decide who failed first: the coordinator of the failure channel, a thread of rank 0.

It accepts one connection per rank, receives beats and reports, and sends all ranks ONE first cause.
It uses no process group, so it still works when they break. Its peers: training/faults/monitor.py.
"""

import hmac
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from training.faults import messages
from training.faults.activity import say
from training.faults.hang_detector import HangDetector
from training.faults.store import spans
from training.faults.wire import HELLO, LIMIT, Connection, Fields

DIED = "the process died (killed?)"
LOST_CONTACT = "(dead, stopped, or cut off by the network)"
JOIN = 30.0  # seconds in which all ranks join, once they have met
RETURN = 2.0  # seconds in which a rank whose connection was reset must reconnect
PATIENCE = 5.0  # seconds in which a caller must identify itself
SPARE = 128  # callers, at most, beyond the number of ranks: then the oldest is closed
ACCEPTS = 64  # connections accepted in one turn


def at(action: str) -> str:
    """Return an action after "during" or "while": "during the update", "while waiting for F"."""
    return f"{'while' if action.split(' ')[0].endswith('ing') else 'during'} {action}"


@dataclass(frozen=True)
class Cause:
    """The rank that failed first, its action, and why.

    quick: no rank can end in a better way, so all leave at once. address: of a process that no
    longer responds (JSON); its peers on the same host kill it.
    """

    rank: int
    action: str
    why: str
    quick: int = 0
    address: str = ""

    def __str__(self) -> str:
        where = f" {at(self.action)}" if self.action else ""
        return f"rank {self.rank} failed first{where}: {self.why}"


@dataclass(eq=False)
class Caller:
    """A connection that has not identified itself yet. since: when it was accepted."""

    connection: Connection
    since: float


@dataclass(eq=False)
class Member:
    """The coordinator's state of a rank that has joined. session: identifies its process."""

    rank: int
    session: Any
    connection: Connection | None
    address: str  # of its host, as other hosts reach it
    action: str = "start-up"
    last: float = field(default_factory=time.monotonic)  # when it last reported
    disconnected: float | None = None  # when its connection broke
    left: bool = False  # it has announced its end, or it is lost


class Coordinator(threading.Thread):
    """Accept one connection per rank, decide on the first cause, send it to all.

    listener: a socket that listens. secret: the one in a rank's hello. silence: seconds without a
    message after which a rank counts as lost. beat: seconds between beats. detector: finds hangs.
    """

    def __init__(
        self,
        world: int,
        listener: socket.socket,
        secret: str,
        silence: float,
        beat: float,
        detector: HangDetector,
    ) -> None:
        super().__init__(name="failure-coordinator", daemon=True)
        self.port: int = listener.getsockname()[1]
        listener.setblocking(False)
        self.listener, self.secret = listener, secret.encode()
        self.callers: list[Caller] = []  # the oldest first
        self.world, self.silence, self.beat, self.detector = world, silence, beat, detector
        self.selector = selectors.DefaultSelector()
        self.begun, self.members = time.monotonic(), dict[int, Member]()
        self.decided: Cause | None = None
        self.weak: list[tuple[float, Cause]] = []  # (when it counts, cause)

    def run(self) -> None:
        try:
            self._serve()
        finally:  # if this thread breaks, the ranks notice at once
            self.close()

    def close(self) -> None:
        """Close every socket. Forked children call it, too."""
        self.listener.close()
        for caller in self.callers:
            caller.connection.close()
        for member in self.members.values():
            if member.connection is not None:
                member.connection.close()

    def _serve(self) -> None:
        looked = sent = accepted = time.monotonic()
        while self._needed():
            quick = len(self.members) < self.world or any(
                m.disconnected for m in self.members.values()
            )
            for key, _ in self.selector.select(timeout=0.02 if quick else 0.1):
                if isinstance(key.data, Caller):
                    self._greet(key.data)
                else:
                    self._listen(key.data)
            now = time.monotonic()
            if quick or now - accepted > 0.1:  # so callers take little of rank 0's time
                accepted = now
                self._accept(now)
            if (
                now - looked > self.detector.shortest(self.silence) / 2
            ):  # this process was stopped, not the others
                for member in self.members.values():
                    member.last = now
            looked = now
            self._examine(now)
            beats = now - sent > self.beat
            sent = now if beats else sent
            for member in self.members.values():
                if member.connection is not None and member.connection.flush() and beats:
                    messages.send(member.connection, "alive", action=self._action_of_rank_0())

    def elsewhere(self) -> str:
        """Return words on the ranks that rank 0 waits for, or that are not where it is, or ""."""
        members = list(self.members.values())
        if absent := sorted(set(range(self.world)) - {m.rank for m in members}):
            return f"waiting for {spans(absent)} to join the failure channel"
        return self.detector.elsewhere(_reports(members, time.monotonic()))

    def has_others(self) -> bool:
        """Return whether another rank than 0 is connected, or may still connect."""
        others = [m for m in list(self.members.values()) if m.rank]
        here = any(m.connection is not None or m.disconnected for m in others)
        return here or len(others) < self.world - 1

    def _action_of_rank_0(self) -> str:
        """Return what rank 0 last reported."""
        return self.members[0].action if 0 in self.members else Member.action

    def _needed(self) -> bool:
        """Return whether any rank still has to join or to leave."""
        if len(self.members) < self.world:
            return True
        return any(m.connection is not None or m.disconnected for m in self.members.values())

    def _accept(self, now: float) -> None:
        """Accept callers; close those that are too many or do not identify themselves in time."""
        for _ in range(ACCEPTS):
            try:
                caller = Caller(Connection(self.listener.accept()[0], HELLO), now)
            except BlockingIOError:
                break
            except OSError:  # out of descriptors, or a connection that is gone already
                for oldest in self.callers[:1]:
                    self._forget(oldest).close()
                break
            self.callers.append(caller)
            self.selector.register(caller.connection.sock, selectors.EVENT_READ, caller)
        late = [caller for caller in self.callers if now - caller.since > PATIENCE]
        for caller in late or self.callers[: -self.world - SPARE]:
            self._forget(caller).close()

    def _forget(self, caller: Caller) -> Connection:
        self.callers.remove(caller)
        self.selector.unregister(caller.connection.sock)
        return caller.connection

    def _greet(self, caller: Caller) -> None:
        """Make a caller with the right secret a member, for the first time or again."""
        hellos = caller.connection.read()
        if not hellos and not caller.connection.ended:
            return
        connection = self._forget(caller)
        if not hellos or (why := self._refusal(hellos[0])):
            if hellos:
                connection.send({"refused": why})
            connection.close()
            return
        connection.send({"welcome": True})
        connection.limit = LIMIT
        rank, session = hellos[0]["rank"], hellos[0].get("session")
        member = self.members.get(rank)
        if member is None:
            member = self.members[rank] = Member(rank, session, connection, connection.address)
        elif member.connection is not None:
            self._part(member)
        self.selector.register(connection.sock, selectors.EVENT_READ, member)
        member.address = connection.address
        member.connection, member.disconnected, member.last = connection, None, time.monotonic()
        messages.send(connection, "alive", action=self._action_of_rank_0())
        messages.send(connection, "place", said=self.detector.place)
        if self.decided is not None:
            messages.send(connection, "cause", **vars(self.decided))

    def _refusal(self, hello: Fields) -> str:
        """Return why a caller is not a rank of this start, or "" if it is one."""
        rank, secret = hello.get("rank"), str(hello.get("secret")).encode(errors="replace")
        if not hmac.compare_digest(secret, self.secret):
            return "the secret is not rank 0's: all ranks of a run need the same WEFT_SECRET"
        if type(rank) is not int or rank not in range(self.world):
            return f"rank {rank} is not one of this run's ranks, 0 to {self.world - 1}"
        member = self.members.get(rank)
        if member is not None and member.session != hello.get("session"):
            return f"another process, at {member.address}, has already joined as rank {rank}"
        return ""

    def _part(self, member: Member) -> None:
        """Close a member's connection."""
        assert member.connection is not None
        self.selector.unregister(member.connection.sock)
        member.connection.close()
        member.connection = None

    def _listen(self, member: Member) -> None:
        """Read a member's messages and detect its end.

        The kernel closes the connection of a killed process in order, or resets it if data were not
        read. The network may also reset it: then the process, if it is alive, reconnects.
        """
        if member.connection is None:
            return  # it reconnected in this turn
        for kind, fields in messages.receive(member.connection):
            self.hear(member, kind, fields)
        ended = member.connection.ended
        if ended:
            self._part(member)
            if not member.left and (ended == "closed" or self.detector.is_gone(member.rank)):
                self._lose(member, DIED)
            elif not member.left:
                member.disconnected = time.monotonic()

    def hear(self, member: Member, kind: str, fields: dict[str, Any]) -> None:
        """Handle a message of a member."""
        member.last = time.monotonic()
        member.action = fields.get("action", member.action)
        if kind in ("bye", "failed"):
            member.left = True
        if kind == "failed":
            cause = Cause(member.rank, member.action, fields["why"])
            if fields["wait"]:
                self.weak.append((member.last + fields["wait"], cause))
            else:
                self.decide(cause)
        elif kind == "stack":
            say(f"[rank 0] the stack of rank {member.rank}, innermost first: {fields['text']}")
        elif kind in ("status", "place"):
            self.detector.hear(member.rank, kind, fields["said"])
        elif kind == "unheard":
            self._unheard(member, fields["address"], fields["seconds"])

    def _unheard(self, member: Member, address: str, seconds: float) -> None:
        """Decide on a dead link between two ranks, if the far rank is connected here.

        If the far rank is silent here too, its silence is the better cause.
        """
        far = [m for m in self.members.values() if m.address == address and not m.left]
        if far and all(member.last - m.last < self.silence / 2 for m in far):
            both = f"{spans([member.rank])} and {spans(sorted(m.rank for m in far))}"
            why = f"no heartbeat from {address} for {seconds:.0f} s: {both} lost contact"
            self.decide(Cause(member.rank, member.action, f"{why} (cut off by the network)"))

    def _lose(self, member: Member, why: str, address: str = "") -> None:
        """Decide on a rank that did not report its own failure, with its last action."""
        member.left, member.disconnected = True, None
        age = time.monotonic() - member.last
        why = f"{why}; its last report, {age:.1f} s before: {member.action}"
        self.decide(Cause(member.rank, "", why, int(bool(address)), address))

    def _examine(self, now: float) -> None:
        members = [m for m in self.members.values() if not m.left]
        patience = {m.rank: self.detector.patience(m.rank, self.silence) for m in members}
        silent = [m for m in members if now - m.last > patience[m.rank]]
        if silent and self.decided is None:
            also = sorted(m.rank for m in members if now - m.last > 0.75 * patience[m.rank])
            what = f"rank 0 and {spans(also)} lost contact {LOST_CONTACT}"
            what, address = self.detector.why_silent(silent[0].rank, what)
            self._lose(silent[0], f"no heartbeat for {now - silent[0].last:.0f} s: {what}", address)
        for member in members:
            if member.disconnected is not None and self.detector.is_gone(member.rank):
                self._lose(member, DIED)
            elif member.disconnected is not None and now - member.disconnected > RETURN:
                what = f"rank 0 and rank {member.rank} lost contact {LOST_CONTACT}"
                self._lose(member, f"its connection was reset and it did not reconnect: {what}")
        absent = set(range(self.world)) - self.members.keys()
        if absent and now - self.begun > JOIN:
            why = "did not join the failure channel (dead, or with a different WEFT_SECRET)"
            self.decide(Cause(min(absent), "start-up", f"{spans(sorted(absent))} {why}"))
        for due, cause in self.weak:
            if now > due:
                self.decide(self._behind(cause, members, now))
        hang, ends = self.detector.look(_reports(members, now), now)
        if hang is not None and ends:
            self.decide(Cause(hang.ranks[0], hang.action, hang.text, quick=1))
        elif hang is not None and self.decided is None:
            say(f"[rank 0] {hang.text}")
            for rank in hang.ranks:
                if (connection := self.members[rank].connection) is not None:
                    messages.send(connection, "report", text=hang.text)

    def _behind(self, cause: Cause, members: list[Member], now: float) -> Cause:
        """Return the cause of a rank's report that it gave up: the rank that it waited for."""
        hang = self.detector.find(_reports(members, now))
        if hang is None:
            elsewhere = [m for m in members if m.action != cause.action][:2]
            more = [f"rank {m.rank} was at: {m.action}" for m in elsewhere]
            why = cause.why + self._shared_by(cause)
            return replace(cause, why="; meanwhile ".join([why, *more]))
        why = f"{hang.text}; rank {cause.rank} gave up: {cause.why}"
        return Cause(hang.ranks[0], hang.action, why, quick=1)

    def _shared_by(self, cause: Cause) -> str:
        """Return the ranks that lost a connection as well, if the cause's rank lost one."""
        broken = [c for _, c in self.weak if c.why.startswith("CommunicationError: ")]
        lost = {c.rank for c in broken if "timed out waiting" not in c.why.lower()}
        if cause.rank not in lost or len(lost) == 1:
            return ""
        few = " and ".join(f"rank {rank}" for rank in sorted(lost))
        who = few if len(lost) < 4 else spans(sorted(lost))
        return f"; {who} lost contact (a connection broke while all processes were alive)"

    def decide(self, cause: Cause) -> None:
        """Record the first cause, and send it to all ranks."""
        if self.decided is None:
            self.decided = cause
            for member in self.members.values():
                if member.connection is not None:
                    messages.send(member.connection, "cause", **vars(cause))


def _reports(members: list[Member], now: float) -> list[tuple[int, str, float]]:
    """Return each member's rank, action and seconds of silence."""
    return [(m.rank, m.action, now - m.last) for m in members if m.connection is not None]
