# SPDX-License-Identifier: Apache-2.0
"""Hosts whose links have a delay and a rate each: network namespaces that a process joins (root).

The kernel here has no netem, so a process carries the packets: each host has a TUN device, and what
goes from host i to host j waits until the link from i to j is free, takes its bytes over the rate,
and arrives after the delay. As a script, `delayed_networks.py JSON`, it is that process.
"""

import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

TUN, NO_INFO, SET = 0x0001, 0x1000, 0x400454CA  # IFF_TUN, IFF_NO_PI, TUNSETIFF
NEW_NET = 0x40000000  # CLONE_NEWNET
MTU = 9000


class DelayedNetworks:
    """Hosts at 10.98.0.1, 10.98.0.2, ... delay[i][j]: seconds; rate[i][j]: bytes a second."""

    def __init__(self, delay: Sequence[Sequence[float]], rate: Sequence[Sequence[float]]) -> None:
        self.names = [f"weftd{os.getpid()}-{i}" for i in range(len(delay))]
        self.delay, self.rate = delay, rate

    def __enter__(self) -> "DelayedNetworks":
        for name in self.names:
            run("ip", "netns", "add", name)
        about = {"names": self.names, "delay": self.delay, "rate": self.rate}
        self.carrier = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), json.dumps(about)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.carrier.stdout is not None and self.carrier.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.carrier.kill()
        self.carrier.wait()
        for name in self.names:
            run("ip", "netns", "del", name)

    def run(self, words: Sequence[str], limit: float, **env: str) -> list[str]:
        """Run a command on every host, one rank each; return what each printed."""
        shared = {"WORLD_SIZE": str(len(self.names)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        shared |= {"MASTER_ADDR": "10.98.0.1", "MASTER_PORT": "29779", "OMP_NUM_THREADS": "1"}
        shared |= {"GLOO_SOCKET_IFNAME": "e0", **env}
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *words], env={**os.environ, **shared, "RANK": str(i)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for i, name in enumerate(self.names)
        ]  # fmt: skip
        deadline = time.monotonic() + limit
        try:
            said = [rank.communicate(timeout=deadline - time.monotonic())[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert all(rank.returncode == 0 for rank in ranks), said
        return said


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def open_device(name: str, address: str) -> int:
    """Enter a namespace and make its device; return what reads and writes packets of it."""
    space = os.open(f"/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, NEW_NET):
        raise OSError(ctypes.get_errno(), f"{name}: setns")
    os.close(space)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, SET, struct.pack("16sH22s", b"e0", TUN | NO_INFO, b""))
    for words in (f"addr add {address}/24 dev e0", f"link set e0 mtu {MTU} txqueuelen 5000 up",
                  "link set lo up"):  # fmt: skip
        run("ip", *words.split())
    return device


def carry(names: list[str], delay: list[list[float]], rate: list[list[float]]) -> None:
    """Carry packets for ever, before whatever else the machine does."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    devices = [open_device(name, f"10.98.0.{i + 1}") for i, name in enumerate(names)]
    n = len(devices)
    free = [[0.0] * n for _ in range(n)]
    flying: list[tuple[float, int, int, bytes]] = []
    count = 0
    print("ready", flush=True)
    while True:
        wait = max(0.0, flying[0][0] - time.monotonic()) if flying else None
        ready, _, _ = select.select(devices, [], [], wait)
        now = time.monotonic()
        for device in ready:
            source = devices.index(device)
            for _ in range(64):
                try:
                    packet = os.read(device, MTU + 100)
                except BlockingIOError:
                    break
                target = packet[19] - 1
                if packet[0] >> 4 != 4 or packet[16:19] != b"\x0a\x62\x00" or not 0 <= target < n:
                    continue
                begins = max(now, free[source][target])
                free[source][target] = begins + len(packet) / rate[source][target]
                due = free[source][target] + delay[source][target]
                heapq.heappush(flying, (due, count, target, packet))
                count += 1
        now = time.monotonic()
        while flying and flying[0][0] <= now:
            _, _, target, packet = heapq.heappop(flying)
            try:
                os.write(devices[target], packet)
            except OSError:
                pass  # a full queue drops it, and TCP sends it again


if __name__ == "__main__":
    carry(**json.loads(sys.argv[1]))
