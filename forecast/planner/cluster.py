# SPDX-License-Identifier: Apache-2.0
"""Read a cluster file: nodes, GPUs of a node, the device, and one to four levels of links.

A level joins blocks of `gpus` neighbours (0: the whole cluster), inner levels first: NVLink in a
node, rails of several nodes, a spine, sites. A file without "levels" has two: the device's links in
a node, and one network of all nodes, {"network_gbps_per_gpu", "oversubscription"}. The memory of a
node's host, "host_memory_gb", is optional.

"8xh100" and "4x8xa100-40" need no file: one node of 8 GPUs, 4 nodes of 8. Their links in a node are
the GPU's (training/run/gpus.py); the network between nodes is that of the device file. "2xcpu"
means two ranks on the cores of a machine without GPUs (forecast/planner/devices/cpu.json).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from forecast.device_file import Device, DeviceFileError, read_device
from forecast.device_file import Level as DeviceLevel
from forecast.fit import available
from training.files.untrusted import read_json

FOLDER = Path(__file__).resolve().parent / "clusters"
SHARED = {"name", "device", "nodes", "gpus_per_node", "source"}
HOST, HOST_GB = "host_memory_gb", 2000  # key, and default: NVIDIA DGX H100 datasheet
CPU = Path(__file__).resolve().parent / "devices" / "cpu.json"  # the device called "cpu"
HOST_SHARE = 0.8  # share of the host's memory that a plan may use
NETWORK = {"network_gbps_per_gpu", "oversubscription"}
LEVEL = {"name", "gpus", "gbps_per_gpu", "latency_us", "oversubscription"}
MOST_LEVELS = 4
GBPS = 1e9 / 8  # bytes per second


class ClusterError(ValueError):
    """A cluster cannot be used. The message names the file, the key and the rule."""


@dataclass(frozen=True)
class Level:
    """Links that join blocks of the level below to blocks of `gpus` consecutive ranks (0: all).

    bandwidth: bytes per second of a GPU in one direction. latency: seconds of a small message.
    oversubscription: total bandwidth of the blocks below, divided by that of the links.
    """

    name: str
    gpus: int
    bandwidth: float
    latency: float
    oversubscription: float = 1.0

    @property
    def share(self) -> float:
        """Return the bytes per second of a GPU if all GPUs send."""
        return self.bandwidth / self.oversubscription


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `node` GPUs each, and the levels that join them, inner ones first.

    host: bytes of a node's host memory that a plan may use for offloaded activations and state.
    """

    name: str
    device: str
    nodes: int
    node: int
    levels: tuple[Level, ...]
    host: float = HOST_SHARE * HOST_GB * 1e9

    @property
    def gpus(self) -> int:
        return self.nodes * self.node

    @property
    def network(self) -> float:
        """Return a GPU's bytes per second across nodes: that of the slowest level in use."""
        inside = [level for level in self.levels if 0 < level.gpus < max(self.gpus, self.node + 1)]
        used = self.levels[: len(inside) + 1]
        beyond = [level.share for level in used if not 0 < level.gpus <= self.node]
        return min(beyond or [used[-1].share])

    @property
    def cpu(self) -> bool:
        """Return whether ranks compute on CPU cores, which have no compute capability."""
        return not read_device(self.device).major

    @cached_property
    def memory(self) -> float:
        """Return the bytes of a GPU's memory."""
        return read_device(self.device)["memory"]

    @property
    def limit(self) -> float:
        """Return the bytes of a GPU's memory that are available to a plan."""
        return available(self.memory)

    def links(self) -> Device:
        """Return the device with the levels of this cluster instead of its own.

        A level within a node has the latencies of the device's first level, any other level those
        of its last, scaled to the level's own latency.
        """
        device = read_device(self.device)
        levels = []
        for level in self.levels:
            like = device.levels[0 if 0 < level.gpus <= self.node else -1]
            scale = level.latency / like.step_seconds[-1]
            steps, trees = (
                tuple(seconds * scale for seconds in each)
                for each in (like.step_seconds, like.tree_seconds)
            )
            levels.append(DeviceLevel(level.name, level.gpus, level.share, steps, trees))
        return replace(device.changed(oversubscription=1.0), levels=tuple(levels))

    def of(self, nodes: int) -> "Cluster":
        """Return the cluster with another number of nodes."""
        return replace(self, nodes=nodes)


def read_cluster(name: str) -> Cluster:
    """Return the cluster of a file, a name in clusters/, or "4x8xh100". Raises ClusterError."""
    if counted := re.fullmatch(r"(?:(\d{1,6})x)?(\d{1,4})x([^/]+)", name):
        return _of_gpus(name, int(counted[1] or 1), int(counted[2]), counted[3])
    path = Path(name) if "/" in name or name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise ClusterError(
            f"{name}: no cluster file {path.name}; the known names are {known}; 8xh100 and "
            "4x8xh100 need no file"
        )
    content = read_json(path)
    kinds = (SHARED | NETWORK, SHARED | {"levels"})
    if not isinstance(content, dict) or content.keys() - {HOST} not in kinds:
        either = " and ".join(sorted(NETWORK))
        raise ClusterError(
            f"{path}: must be an object with {', '.join(sorted(SHARED))}, and with levels or with "
            f"{either}; {HOST} is optional"
        )
    if not isinstance(content["device"], str):
        raise ClusterError(f"{path}: device is {content['device']!r}, not the name of a GPU")
    content["device"] = _device(content["device"])
    try:
        read_device(content["device"])
    except DeviceFileError as error:
        raise ClusterError(f"{path}: device: {error}") from None
    if not isinstance(content["source"], str) or len(content["source"]) < 10:
        raise ClusterError(
            f"{path}: source is {content['source']!r}: it must say where the numbers are from, in "
            "10 letters or more"
        )
    for key in ("nodes", "gpus_per_node"):
        _number(path, key, content[key], 1, integer=True)
    node = content["gpus_per_node"]
    levels = _levels(path, content["levels"], node) if "levels" in content else _two(path, content)
    memory = content.get(HOST, HOST_GB)
    _number(path, HOST, memory, 0)
    host = HOST_SHARE * memory * 1e9
    return _with_own_memory(
        Cluster(str(content["name"]), content["device"], content["nodes"], node, levels, host)
    )


def _of_gpus(name: str, nodes: int, node: int, gpu: str) -> Cluster:
    """Return a cluster of `nodes` nodes with `node` GPUs each. Raises ClusterError."""
    if not nodes or not node:
        raise ClusterError(f"{name}: a cluster must have at least one node and one GPU a node")
    gpu = _device(gpu)
    try:
        device = read_device(gpu)
    except DeviceFileError as error:
        raise ClusterError(f"{name}: {error}") from None
    inner, *outer = device.levels
    inside = Level(inner.name, node, inner.bandwidth, inner.step_seconds[-1])
    last = (outer or [inner])[0]
    network = Level("network", 0, last.bandwidth, last.step_seconds[-1])
    levels = (inside, network) if node > 1 else (network,)
    return _with_own_memory(Cluster(name, gpu, nodes, node, levels))


def _device(name: str) -> str:
    """Return the name of a device for read_device: a path for "cpu"."""
    return str(CPU) if name == "cpu" else name


def _with_own_memory(cluster: Cluster) -> Cluster:
    """Return the cluster, with no host memory for CPU ranks, whose own memory that is."""
    return replace(cluster, host=0.0) if cluster.cpu else cluster


def _two(path: Path, content: dict[str, Any]) -> tuple[Level, ...]:
    """Return the levels of a file that has only a network: the device's own links, the network."""
    _number(path, "network_gbps_per_gpu", content["network_gbps_per_gpu"], 0.01)
    _number(path, "oversubscription", content["oversubscription"], 1)
    inner, *outer = read_device(content["device"]).levels
    node = Level("node", content["gpus_per_node"], inner.bandwidth, inner.step_seconds[-1])
    rate = content["network_gbps_per_gpu"] * GBPS
    network = Level(
        "network", 0, rate, (outer or [inner])[0].step_seconds[-1], content["oversubscription"]
    )
    return (node, network) if node.gpus > 1 else (network,)


def _levels(path: Path, found: Any, node: int) -> tuple[Level, ...]:
    """Return the levels that a file lists. Raises ClusterError."""
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_LEVELS:
        raise ClusterError(f"{path}: levels must be a list of 1 to {MOST_LEVELS}")
    levels, below = [], 1
    for n, entry in enumerate(found):
        where = f"levels[{n}]"
        if not isinstance(entry, dict) or entry.keys() != LEVEL:
            raise ClusterError(f"{path}: {where} must be an object with {', '.join(sorted(LEVEL))}")
        for key, least, integer in (
            ("gpus", 0, True), ("gbps_per_gpu", 1e-6, False), ("latency_us", 0, False),
            ("oversubscription", 1, False),
        ):  # fmt: skip
            _number(path, f"{where}.{key}", entry[key], least, integer)
        gpus, last = entry["gpus"], n == len(found) - 1
        if last != (gpus == 0):
            raise ClusterError(
                f"{path}: {where}.gpus is {gpus}: it must be 0 (all GPUs) in the last level, and "
                "only there"
            )
        if gpus and (gpus <= below or gpus % below or (gpus % node and node % gpus)):
            raise ClusterError(
                f"{path}: {where}.gpus is {gpus}: must be a larger multiple of {below}, the level "
                f"below, and a multiple or a divisor of {node}, the GPUs of a node"
            )
        below = gpus
        rate = entry["gbps_per_gpu"] * GBPS
        levels.append(Level(str(entry["name"]), gpus, rate, entry["latency_us"] * 1e-6,
                            entry["oversubscription"]))  # fmt: skip
    return tuple(levels)


def content_of(
    name: str, device: str, nodes: int, node: int, levels: Sequence[Level], source: str
) -> dict[str, Any]:
    """Return the content of a cluster file, for read_cluster."""
    return {
        "name": name, "device": device, "nodes": nodes, "gpus_per_node": node,
        "levels": [
            {"name": level.name, "gpus": level.gpus, "gbps_per_gpu": level.bandwidth / GBPS,
             "latency_us": level.latency * 1e6, "oversubscription": level.oversubscription}
            for level in levels
        ],
        "source": source,
    }  # fmt: skip


def _number(path: Path, key: str, value: Any, least: float, integer: bool = False) -> None:
    """Raise ClusterError unless a value of the file is a number of at least `least`."""
    right = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    if not right or not least <= value < 1e6:
        kind = "a whole number" if integer else "a number"
        raise ClusterError(f"{path}: {key} is {value!r}, not {kind} from {least:g} to 1e6")
