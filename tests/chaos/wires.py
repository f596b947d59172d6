# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a wire between them that can be cut, slow, lossy or reset.

Each namespace has one device, weft0, whose packets this process reads and writes (TUN): it is the
wire. So a partition drops packets as a dead switch does; the ranks' kernels notice nothing.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
TUNSETIFF, TUN, NO_INFO = 0x400454CA, 0x1, 0x1000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RESET = 0x04
ENVIRONMENT = {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": "weft0"}


def checksum(data: bytes) -> int:
    """Return the internet checksum of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Wire:
    """Two namespaces and what lies between them, until closed.

    cut: drop every packet. loss: the share of packets dropped. delay: seconds that each takes.
    paths: a file for each namespace, which setns takes.
    """

    def __init__(self, seed: int) -> None:
        self.cut, self.loss, self.delay = False, 0.0, 0.0
        self.rng, self.passed = random.Random(seed), 0
        self.devices: list[int] = []
        self.paths: list[str] = []
        self._files: list[int] = []
        self._flows: dict[bytes, tuple[int, int]] = {}
        self._open = True
        for address in ADDRESSES:
            thread = threading.Thread(target=self._make, args=(address,))
            thread.start()
            thread.join()
        assert len(self.paths) == 2, "no network namespaces here: they need Linux and root"
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _make(self, address: str) -> None:
        """Make a namespace in this thread, which alone enters it."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "unshare")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"weft0", TUN | NO_INFO))
        for words in (
            "link set lo up",
            f"addr add {address}/24 dev weft0",
            "link set weft0 up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        here = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
        self._files.append(os.open(here, os.O_RDONLY))
        self.devices.append(device)
        self.paths.append(f"/proc/{os.getpid()}/fd/{self._files[-1]}")

    def _carry(self) -> None:
        """Carry packets until closed."""
        late: list[tuple[float, int, int, bytes]] = []
        while self._open:
            wait = min(0.05, max(0.0, late[0][0] - time.monotonic())) if late else 0.05
            for device in select.select(self.devices, [], [], wait)[0]:
                with suppress(OSError):
                    packet = os.read(device, 65536)
                    to = self.devices[1 - self.devices.index(device)]
                    self._note(packet, device)
                    if self.cut or self.rng.random() < self.loss:
                        continue
                    self.passed += 1
                    entry = (time.monotonic() + self.delay, self.passed, to, packet)
                    heapq.heappush(late, entry)
            while late and late[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(late)
                with suppress(OSError):
                    os.write(to, packet)

    def _note(self, packet: bytes, device: int) -> None:
        """Remember, of each end of each connection, the number of the byte that it expects next."""
        if packet[0] >> 4 != 4 or packet[9] != 6:  # not TCP over IPv4
            return
        head = 4 * (packet[0] & 15)
        expected = struct.unpack_from("!I", packet, head + 8)[0]  # of the other end's bytes
        self._flows[packet[12:20] + packet[head : head + 4]] = (device, expected)

    def reset(self) -> None:
        """End every connection of both sides, as a firewall that forgot them does."""
        for key, (device, expected) in list(self._flows.items()):
            source, target, ports = key[:4], key[4:8], key[8:]
            tcp = ports[2:] + ports[:2] + struct.pack("!IIBBHHH", expected, 0, 0x50, RESET, 0, 0, 0)
            pseudo = target + source + struct.pack("!BBH", 0, 6, len(tcp))
            tcp = tcp[:16] + struct.pack("!H", checksum(pseudo + tcp)) + tcp[18:]
            ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0) + target + source
            ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
            with suppress(OSError):
                os.write(device, ip + tcp)

    def heal(self) -> None:
        """Carry everything again."""
        self.cut, self.loss, self.delay = False, 0.0, 0.0
        self._flows.clear()

    def close(self, *error: Any) -> None:
        """Take the wire away."""
        self._open = False
        self._thread.join()
        for file in (*self.devices, *self._files):
            os.close(file)
