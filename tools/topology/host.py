# SPDX-License-Identifier: Apache-2.0
"""Read a rank's place on its host: NUMA node, network cards and how near they are to its GPU.

All data come from sysfs, whose root is an argument. NCCL reads the same data, so it needs a file
(NCCL_TOPO_FILE) only if sysfs hides which cards share a switch, as in many virtual machines.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


@dataclass(frozen=True)
class Card:
    """A card on the PCI bus. numa: -1 if it is unknown. path: the bridges above it."""

    name: str
    address: str
    numa: int
    path: tuple[str, ...]
    gbps: float = 0.0  # of a network card, as its driver reports it


@dataclass(frozen=True)
class Place:
    """A rank's place: its CPUs and their NUMA node, its GPU if any, the host's network cards.

    near: names of the cards that share most bridges with the GPU, or the NUMA node without one.
    """

    cpus: tuple[int, ...]
    numa: int
    gpu: Card | None
    cards: tuple[Card, ...]
    near: tuple[str, ...]


def read_cpus(text: str) -> tuple[int, ...]:
    """Return the numbers of a list as Linux writes it: "0-3,8"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)


def numa_of(cpus: Sequence[int], root: Path = Path("/sys")) -> int:
    """Return the NUMA node of these CPUs; -1 if several nodes have some, or it is unknown."""
    holders = set()
    for node in sorted((root / "devices/system/node").glob("node[0-9]*")):
        if set(read_cpus((node / "cpulist").read_text())) & set(cpus):
            holders.add(int(node.name.removeprefix("node")))
    return holders.pop() if len(holders) == 1 else -1


def card(name: str, device: Path, gbps: float = 0.0) -> Card:
    """Return the card of a device's folder in sysfs, which may be a link."""
    real = device.resolve()
    above = tuple(part for part in real.parts if part.startswith("pci") or ADDRESS.fullmatch(part))
    text = (real / "numa_node").read_text().strip() if (real / "numa_node").exists() else "-1"
    return Card(name, real.name, int(text), above[:-1], gbps)


def cards_of(root: Path = Path("/sys")) -> tuple[Card, ...]:
    """Return the host's InfiniBand cards, or else its Ethernet cards on the PCI bus."""
    found = []
    for kind, speed, unit in (("infiniband", "ports/1/rate", 1.0), ("net", "speed", 1e-3)):
        for entry in sorted((root / "class" / kind).glob("*")):
            if not (entry / "device").exists():
                continue
            try:
                match = re.match(r"\s*(\d+(?:\.\d+)?)", (entry / speed).read_text())
            except OSError:
                match = None
            rate = float(match[1]) * unit if match else 0.0
            found.append(card(entry.name, entry / "device", rate))
        if found:
            break
    return tuple(found)


def place_of(gpu_address: str | None, root: Path = Path("/sys")) -> Place:
    """Return this process's place. gpu_address: of its GPU on the PCI bus, as CUDA reports it."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    cards, gpu = cards_of(root), None
    if gpu_address and (device := root / "bus/pci/devices" / gpu_address.lower()).exists():
        gpu = card("gpu", device)
    numa = numa_of(cpus, root)
    if gpu is not None:
        shared = {c.name: len(os.path.commonprefix([list(gpu.path), list(c.path)])) for c in cards}
        best = max(shared.values(), default=0)
        near = tuple(name for name, count in shared.items() if count == best > 0)
    else:
        near = tuple(c.name for c in cards if c.numa == numa >= 0)
    return Place(cpus, numa, gpu, cards, near)


def findings(place: Place, rank: int) -> list[str]:
    """Return a line for each problem with the place of a rank."""
    found = []
    if place.gpu is not None and -1 != place.numa != place.gpu.numa != -1:
        found.append(
            f"rank {rank} runs on NUMA node {place.numa}, but its GPU is on node "
            f"{place.gpu.numa}: bind the rank with numactl --cpunodebind={place.gpu.numa}"
        )
    if place.gpu is not None and place.cards and not place.near:
        cards = ", ".join(each.name for each in place.cards)
        found.append(
            f"rank {rank}: the host does not show which of {cards} is near its GPU, so NCCL "
            "guesses: set NCCL_TOPO_FILE to the topology file of the cloud's image for this "
            "machine (NCCL_TOPO_DUMP_FILE writes what NCCL sees)"
        )
    return found
