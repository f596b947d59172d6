# SPDX-License-Identifier: Apache-2.0
"""What the storm does to a run from outside: signals, files, callers on the network.

Each function takes the scene of tests/chaos/play.py: its folder, its ranks' process ids, its drawn
numbers. Most run while every rank waits in the fault's step; those of `damage` while nobody runs.
"""

import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PAUSE = 2.0  # seconds, well below --peer-timeout


def pause(scene: Any, pids: list[int]) -> None:
    """Stop processes for a while."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def pause_a_rank(scene: Any) -> None:
    pause(scene, [scene.pids[scene.fault.rank]])


def pause_all(scene: Any) -> None:
    pause(scene, scene.pids)


def sigterm(scene: Any) -> None:
    os.kill(scene.pids[scene.fault.rank], signal.SIGTERM)


def sigusr1(scene: Any) -> None:
    os.kill(scene.pids[scene.fault.rank], signal.SIGUSR1)


def sigint(scene: Any) -> None:
    for pid in scene.pids:  # as a terminal does
        os.kill(pid, signal.SIGINT)


def sighup(scene: Any) -> None:
    for pid in scene.pids:
        os.kill(pid, signal.SIGHUP)


def sigterm_storm(scene: Any) -> None:
    """Send 20 SIGTERM to ranks that are drawn, until the run ends."""
    for _ in range(20):
        with suppress(ProcessLookupError):
            os.kill(scene.rng.choice(scene.pids), signal.SIGTERM)
        scene.go()
        time.sleep(scene.rng.uniform(0, 0.03))


def truncate_corpus(scene: Any) -> None:
    path = scene.folder / "corpus.bin"
    os.truncate(path, path.stat().st_size // 8)


def overwrite_corpus(scene: Any) -> None:
    """Write other tokens, each within the vocabulary, over all of the file."""
    path = scene.folder / "corpus.bin"
    with open(path, "r+b") as file:
        file.write(bytes(random.Random(1).choices(range(200), k=path.stat().st_size // 2)) * 2)


def newest(scene: Any) -> Path:
    """Return the newest committed checkpoint."""
    return max((scene.folder / "saved").glob("step_????????/manifest.json")).parent


def victim_file(scene: Any) -> Path:
    """Draw a file of the newest checkpoint that its manifest lists."""
    directory = newest(scene)
    files = json.loads((directory / "manifest.json").read_text())["files"]
    path = directory / scene.rng.choice(sorted(files))
    scene.seen.hit = path.name
    return path


def damage_flip(scene: Any) -> None:
    path = victim_file(scene)
    data = bytearray(path.read_bytes())
    data[scene.rng.randrange(len(data))] ^= 1 << scene.rng.randrange(8)
    path.write_bytes(data)


def damage_truncate(scene: Any) -> None:
    path = victim_file(scene)
    os.truncate(path, scene.rng.randrange(path.stat().st_size))


def damage_remove(scene: Any) -> None:
    victim_file(scene).unlink()


def listening(pid: int) -> list[int]:
    """List the TCP ports on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(link))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                ports.append(int(words[1].rpartition(":")[2], 16))
    return sorted(set(ports))


def hub_ports(scene: Any) -> list[int]:
    """List rank 0's ports but for that of torch's store, which does not authenticate anybody."""
    return [port for port in listening(scene.pids[0]) if port != scene.port]


RUBBISH: list[Callable[[random.Random], bytes]] = [
    lambda rng: b"[" * 30_000 + b"\n",
    lambda rng: rng.randbytes(5000),
    lambda rng: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda rng: b'{"rank": 1, "failed": "forged", "wait": 0, "action": "\\u001b[2J"}\n',
    lambda rng: b'{"rank": 1, "token": "guess", "failed": "forged", "wait": 0}\n',
    lambda rng: b"{" * 200_000,
    lambda rng: b'{"rank": 99999999999999999999, "token": null}\n' * 50,
    lambda rng: b"\n" * 70_000,
    lambda rng: b"",
]


def garbage(scene: Any) -> None:
    """Send rubbish to rank 0's port: nested, random, forged, endless, nothing; end by a reset."""
    for port in hub_ports(scene):
        for make in scene.rng.sample(RUBBISH, len(RUBBISH)):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as caller:
                caller.settimeout(0.2)
                caller.sendall(make(scene.rng))
                with suppress(TimeoutError):
                    caller.recv(100)
                if scene.rng.random() < 0.5:
                    linger = struct.pack("ii", 1, 0)
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    time.sleep(0.5)


def idle_connections(scene: Any) -> None:
    """Open 300 connections that say nothing and stay until the run has ended."""
    for port in hub_ports(scene):
        for _ in range(300):
            with suppress(OSError):
                scene.keep.append(socket.create_connection(("127.0.0.1", port), 2))
    time.sleep(0.5)


def partition(scene: Any) -> None:
    scene.wire.cut = True


def short_partition(scene: Any) -> None:
    """Cut the wire under the traffic of a step, for less than --peer-timeout."""
    scene.wire.cut = True
    scene.go()
    time.sleep(PAUSE)
    scene.wire.heal()


def delay(scene: Any) -> None:
    scene.wire.delay = scene.rng.uniform(0.005, 0.05)


def loss(scene: Any) -> None:
    scene.wire.loss = scene.rng.uniform(0.01, 0.05)


def reset(scene: Any) -> None:
    """Reset every connection, in the middle of the steps."""
    scene.go()
    time.sleep(scene.rng.uniform(0, 0.02))
    scene.wire.reset()


def kill_launcher(scene: Any) -> None:
    """Kill -9 the launcher; its ranks have a second to notice before they go on."""
    scene.kill_launcher()
    time.sleep(1.5)
