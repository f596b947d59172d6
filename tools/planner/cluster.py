# SPDX-License-Identifier: Apache-2.0
"""Read a cluster file: nodes, GPUs of a node, the device, and each GPU's share of the network."""

from dataclasses import dataclass, replace
from pathlib import Path

from tools.planner.constants import DEVICES
from training.untrusted import read_json

FOLDER = Path(__file__).resolve().parent / "clusters"
KEYS = {"name", "device", "nodes", "gpus_per_node", "network_gbps_per_gpu", "oversubscription",
        "source"}  # fmt: skip


class ClusterError(ValueError):
    """A cluster that cannot be used: the text names the file, the key and the rule."""


@dataclass(frozen=True)
class Cluster:
    """nodes of `node` GPUs. network: bytes a second of a GPU across nodes, one direction."""

    name: str
    device: str
    nodes: int
    node: int
    network: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.node

    def of(self, nodes: int) -> "Cluster":
        """Return the same with another number of nodes."""
        return replace(self, nodes=nodes)


def read_cluster(name: str) -> Cluster:
    """Return the cluster of a file, or of a name in clusters/. Raises ClusterError."""
    path = Path(name) if "/" in name or name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise ClusterError(f"{name}: no cluster file {path.name}; known by name are {known}")
    content = read_json(path)
    if not isinstance(content, dict) or content.keys() != KEYS:
        raise ClusterError(f"{path}: must be an object with {', '.join(sorted(KEYS))}")
    if content["device"] not in DEVICES:
        raise ClusterError(f"{path}: device is {content['device']!r}, not of {', '.join(DEVICES)}")
    if not isinstance(content["source"], str) or len(content["source"]) < 10:
        raise ClusterError(f"{path}: names no source")
    for key, least, whole in (("nodes", 1, True), ("gpus_per_node", 1, True),
                              ("network_gbps_per_gpu", 0.01, False),
                              ("oversubscription", 1, False)):  # fmt: skip
        value = content[key]
        right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not right or not least <= value < 1e6:
            kind = "a whole number" if whole else "a number"
            raise ClusterError(f"{path}: {key} is {value!r}, not {kind} of at least {least}")
    rate = content["network_gbps_per_gpu"] / content["oversubscription"] / 8 * 1e9
    return Cluster(str(content["name"]), content["device"], content["nodes"],
                   content["gpus_per_node"], rate)  # fmt: skip
