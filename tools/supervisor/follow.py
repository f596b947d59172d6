# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a node other than 0: it does what node 0's says (tools/supervise.py)."""

import argparse
import queue
import signal
import threading
import time
from contextlib import suppress

from tools.supervisor.channel import Channel, WireError, call
from tools.supervisor.flags import MEET, SIGNALS, ignore_signals
from tools.supervisor.node import Event, Node
from tools.supervisor.report import MISTAKE, say
from training.activity import Activity
from training.faults.wire import nonce

AGAIN = 0.3  # seconds between two calls of a node 0 that does not answer


class Follower:
    """Another node's supervisor: it does what the leader says, and ends with its exit code."""

    def __init__(self, options: argparse.Namespace, argv: list[str], secret: bytes) -> None:
        self.options, self.argv, self.secret = options, argv, secret
        self.channel: Channel | None = None
        self.signals = queue.SimpleQueue[int]()
        self.signalled = 0
        for number in SIGNALS:
            signal.signal(number, lambda n, _: self.signals.put(n))
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        while True:
            self.signalled = self.signals.get()
            self.send({"signal": self.signalled})  # it comes back, for the ranks of all nodes

    def send(self, event: Event) -> None:
        """Tell the leader, if there is one."""
        with suppress(WireError):
            if self.channel is not None:
                self.channel.send(event)

    def run(self) -> int:
        """Follow until the leader ends the run, or is gone for --node-wait seconds."""
        o, node, limit, session = self.options, None, MEET, nonce()
        try:
            while not self.signalled or self.channel:
                try:
                    channel = self._call(session, limit)
                    if channel is None:
                        break
                    if node is None:
                        node = Node(
                            self.argv, o, self.secret, host=channel.here, port=0, event=self.send
                        )
                    channel.send({"slots": o.nproc_per_node, "port": node.port})
                    self.channel = channel
                    while "end" not in (message := channel.receive()[0]):
                        channel.send(message) if "beat" in message else node.do(message)
                    return int(message["end"])
                except WireError as error:
                    if self.channel is not None and node is not None:
                        say(f"node 0 is lost, so the ranks here are ended: {error}")
                        node.do({"signal": int(signal.SIGKILL)})
                        self.channel, limit = None, o.node_wait
                        continue
                    if error.final:
                        say(f"node 0 refuses --node-rank {o.node_rank}: {error}")
                        return MISTAKE
                    say(f"node 0 cannot be reached in {limit:.0f} s: {error}")
                    return 1
            return 128 + self.signalled
        finally:
            ignore_signals()
            if node is not None:
                node.close()

    def _call(self, session: bytes, limit: float) -> Channel | None:
        """Connect to node 0, or return None after a signal. Raises WireError: after `limit` seconds
        the last one, at once where to try again would not help.
        """
        o, deadline, why = self.options, time.monotonic() + limit, "no answer"
        with Activity(tell=say).waiting(
            "waiting for node 0",
            lambda: f"waiting for node 0 at {o.master_addr}:{o.master_port}: {why}",
            limit=limit, over=lambda: "" if self.signalled else "node 0 has answered",
        ):  # fmt: skip
            while not self.signalled:
                try:
                    return call(
                        o.master_addr, o.master_port, self.secret, o.peer_timeout,
                        kind="node", number=o.node_rank, session=session,
                    )  # fmt: skip
                except WireError as error:
                    why = str(error)
                    if error.final or time.monotonic() > deadline:
                        raise
                time.sleep(AGAIN)
        return None
