# SPDX-License-Identifier: Apache-2.0
"""Find dead links between hosts whose processes are alive, from the kernel's TCP state.

A collective over a dead link waits: TCP retransmits its data for a quarter of an hour before it
gives up. The sender's kernel counts these retransmissions (TCP_INFO). A peer that is only slow, or
stopped, still acknowledges the data it receives, and even that its buffer is full. Linux only.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator

from training.faults.address import is_loopback

INFO = struct.Struct("=8B12I")  # the beginning of struct tcp_info
ESTABLISHED = 1
LOOK = 2.0  # seconds between looks


class Links:
    """This process's TCP connections to other hosts. limit: seconds after which one is dead."""

    def __init__(self, limit: float) -> None:
        self.limit, self._looked = limit, 0.0
        self._vain: dict[tuple[str, str], float] = {}  # {(socket, address): silent since}

    def dead(self) -> Iterator[tuple[str, float]]:
        """Yield (address, seconds) of peers that have acknowledged nothing for longer than the
        limit. It looks at most every LOOK seconds.
        """
        now = time.monotonic()
        if now - self._looked < min(LOOK, self.limit / 4):
            return
        self._looked, before, self._vain = now, self._vain, {}
        for link in _vain():
            since = self._vain[link] = before.get(link, now)
            if now - since > self.limit:
                yield link[1], now - since


def _vain() -> Iterator[tuple[str, str]]:
    """Yield (socket, peer's address) of connections with retransmissions or probes unanswered."""
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return
    for fd in descriptors:
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
            if not name.startswith("socket:"):
                continue
            sock = socket.socket(fileno=int(fd))
        except OSError:
            continue  # closed meanwhile
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size))
            address = str(sock.getpeername()[0]).removeprefix("::ffff:")
        except (OSError, struct.error):
            continue  # not TCP, or not connected
        finally:
            sock.detach()  # its owner keeps the descriptor
        state, retransmits, probes = info[0], info[2], info[3]
        if state == ESTABLISHED and (retransmits or probes) and not is_loopback(address):
            yield name, address
