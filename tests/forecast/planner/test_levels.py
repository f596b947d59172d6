# SPDX-License-Identifier: Apache-2.0
"""The orders of a layout's ranks, timed by the clock, over levels of links that a file lists."""

import json

import pytest

from forecast.planner.cluster import FOLDER, ClusterError, read_cluster
from forecast.planner.model import REST
from tools import plan
from training.flags.parse import parse

LEVEL = {"latency_us": 5, "oversubscription": 1}
LAYOUT = (
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--micro-batch-size 1 --zero-stage 1 --overlap-grad-reduce"
)


def orders(sites, capsys, flags):
    """Return the lines of --rank-orders."""
    assert plan.main(["1B", str(sites), "--rank-orders", flags]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.prove
def test_the_order_that_sends_least_between_sites_is_first(tmp_path, capsys):
    """Two sites of 8 GPUs: tp 4 and both ranks of dp, or of pp, share a site.

    A step of few micro-batches sends fewer bytes in messages than in sums of gradients, one of many
    more.
    """
    content = {
        "name": "two sites", "device": "h100", "nodes": 2, "gpus_per_node": 8,
        "source": "this test's",
        "levels": [{"name": "node", "gpus": 8, "gbps_per_gpu": 3600, **LEVEL},
                   {"name": "site", "gpus": 0, "gbps_per_gpu": 4, **LEVEL}],
    }  # fmt: skip
    path = tmp_path / "sites.json"
    path.write_text(json.dumps(content))
    few = orders(path, capsys, f"{LAYOUT} --global-batch-size 4")
    rows = {line.split()[0]: line.split()[1:] for line in few if line.count("-") == 3}
    assert few[0].split()[:3] == ["order", "step", "s"] and len(rows) == 6
    assert few[-1] == "flag of the fastest: --rank-order tp-dp-pp-cp"  # as tp-cp-dp-pp, without cp
    seconds = {order: float(row[0]) for order, row in rows.items()}
    assert seconds["dp-tp-pp-cp"] == seconds["tp-dp-pp-cp"]  # both in a site, so the usual first
    others = [seconds[order] for order in seconds if order.split("-")[2] != "pp"]
    assert len(others) == 4 and min(others) > 1.5 * seconds["tp-dp-pp-cp"]
    many = orders(path, capsys, f"{LAYOUT} --global-batch-size 1024")
    assert many[-1] == "flag of the fastest: --rank-order tp-pp-dp-cp"
    words = [*REST.split(), *LAYOUT.split(), *many[-1].split()[-2:]]
    words += "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64".split()
    assert parse([*words, "--vocab-size", "64"], 16).parallel.rank_order == "tp-pp-dp-cp"


@pytest.mark.prove
def test_a_layout_of_one_axis_has_one_order(capsys):
    assert plan.main(["1B", "8xh100", "--rank-orders", "--micro-batch-size 1 --zero-stage 1"]) == 0
    head, only, *_, last = capsys.readouterr().out.splitlines()
    assert only.split()[0] == "dp-tp-cp-pp" and float(only.split()[1]) > 0
    assert last == "flag of the fastest: --rank-order dp-tp-cp-pp"


def test_what_is_no_layout_of_the_model_is_refused(capsys):
    assert plan.main(["1B", "8xh100", "--rank-orders", "--zero-stage 9"]) == 2
    assert "--zero-stage 9" in capsys.readouterr().err
    assert plan.main(["1B", "8xh100", "--rank-orders", "--num-layers 3"]) == 2
    assert "--num-layers in a layout's flags changes the model, 1B" in capsys.readouterr().err


def test_a_cluster_file_has_one_to_four_levels(tmp_path):
    old = read_cluster("h100_8_nodes")
    assert [level.gpus for level in old.levels] == [8, 0] and old.network == 50e9
    base = {"name": "x", "device": "h100", "nodes": 16, "gpus_per_node": 8, "source": "this test's"}
    level = {"gbps_per_gpu": 400, "latency_us": 5, "oversubscription": 1}
    four = [
        {"name": "nvlink", "gpus": 8, **level, "gbps_per_gpu": 3600},
        {"name": "rail", "gpus": 32, **level},
        {"name": "spine", "gpus": 64, **level, "oversubscription": 2},
        {"name": "site", "gpus": 0, **level, "gbps_per_gpu": 100},
    ]
    path = tmp_path / "c.json"

    def read(levels):
        path.write_text(json.dumps(base | {"levels": levels}))
        return read_cluster(str(path))

    cluster = read(four)
    assert [each.gpus for each in cluster.levels] == [8, 32, 64, 0]
    assert [cluster.of(n).network for n in (1, 4, 8, 16)] == [50e9, 50e9, 25e9, 12.5e9]
    assert read(four[3:]).network == 12.5e9 and len(read(four[3:]).levels) == 1
    for levels, said in (
        ([], "levels must be a list of 1 to 4"),
        (four[:1] * 5, "levels must be a list of 1 to 4"),
        (four[:2], r"levels\[1\].gpus is 32: it must be 0 "),
        ([four[0], {**four[1], "gpus": 20}, four[3]], r"levels\[1\].gpus is 20: must be a larger"),
        ([four[1], four[0], four[3]], r"levels\[1\].gpus is 8: must be a larger multiple of 32"),
        ([four[0], {**four[3], "latency_us": -1}], r"levels\[1\].latency_us is -1"),
        ([four[0], {"name": "x"}], r"levels\[1\] must be an object"),
    ):
        with pytest.raises(ClusterError, match=said):
            read(levels)
    with pytest.raises(ClusterError, match="must be an object with"):
        content = json.loads((FOLDER / "h100_8_nodes.json").read_text())
        path.write_text(json.dumps(content | {"levels": four}))
        read_cluster(str(path))
