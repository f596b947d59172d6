# SPDX-License-Identifier: Apache-2.0
"""tools/probe_topology.py on hosts whose links have known delays and rates: it finds them."""

import itertools
import json
import sys
from pathlib import Path

import pytest

from forecast.planner.cluster import read_cluster
from tests.delayed_networks import DelayedNetworks
from tools.topology import host

TOOL = Path(__file__).resolve().parents[3] / "tools" / "probe_topology.py"
# milliseconds one way, MB a second: 0 and 2 are near, 1 and 3 too, all else is far and not alike
DELAY = [[0, 20, 6, 25], [20, 0, 15, 8], [6, 15, 0, 12], [25, 8, 12, 0]]
RATE = [[0, 4, 12, 3], [3.5, 0, 6, 10], [12, 6, 0, 8], [3, 10, 8, 0]]
RATES = [[1e6 * each for each in row] for row in RATE]
DELAYS = [[1e-3 * each for each in row] for row in DELAY]


@pytest.mark.prove
def test_the_probe_recovers_alpha_and_beta(tmp_path: Path) -> None:
    """On gloo, four hosts: every alpha and beta within 10 %."""
    out, report = tmp_path / "cluster.json", tmp_path / "report.json"
    words = [sys.executable, str(TOOL), "--device", "h100", "--out", str(out)]
    words += ["--report", str(report)]
    with DelayedNetworks(DELAYS, RATES) as hosts:
        said = hosts.run(words, 400.0)
    found = json.loads(report.read_text())
    wrong = []
    for i, j in itertools.permutations(range(4), 2):
        alpha, beta = found["alpha_seconds"][i][j], found["beta_bytes_per_second"][i][j]
        wrong.append((alpha / DELAYS[i][j] - 1, beta / RATES[i][j] - 1, i, j))
    print(said[0], wrong)
    assert max(abs(each[0]) for each in wrong) < 0.10, wrong
    assert max(abs(each[1]) for each in wrong) < 0.10, wrong
    assert said[1] == ""
    cluster = read_cluster(str(out))
    assert cluster.gpus == 4 and cluster.levels[-1].gpus == 0


def test_a_place_is_read_from_sysfs(tmp_path: Path) -> None:
    """Two sockets; each has a GPU and a card behind one switch. The cards are links, as there."""
    for node, cpus in ((0, "0-3,8"), (1, "4-7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        for device, end in (("gpu", "01:00.0"), ("net", "02:00.0")):
            real = tmp_path / f"devices/pci000{node}:00/000{node}:00:01.0/000{node}:{end}"
            real.mkdir(parents=True)
            (real / "numa_node").write_text(f"{node}\n")
            links = tmp_path / "bus/pci/devices"
            links.mkdir(parents=True, exist_ok=True)
            (links / real.name).symlink_to(real)
            if device == "net":
                card = tmp_path / f"class/infiniband/mlx5_{node}"
                (card / "ports/1").mkdir(parents=True)
                (card / "ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
                (card / "device").symlink_to(real)
    assert host.numa_of((1, 8), tmp_path) == 0 and host.numa_of((3, 4), tmp_path) == -1
    place = host.place_of("0001:01:00.0", tmp_path)
    assert place.near == ("mlx5_1",) and place.gpu is not None and place.gpu.numa == 1
    assert [(card.name, card.numa, card.gbps) for card in place.cards] == [
        ("mlx5_0", 0, 400.0),
        ("mlx5_1", 1, 400.0),
    ]
    bound = host.Place((0,), 0, place.gpu, place.cards, place.near)
    assert "numactl --cpunodebind=1" in host.findings(bound, 5)[0]
    hidden = host.Place((4,), 1, place.gpu, place.cards, ())
    assert "NCCL_TOPO_FILE" in host.findings(hidden, 5)[0]
