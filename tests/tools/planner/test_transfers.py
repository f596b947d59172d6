# SPDX-License-Identifier: Apache-2.0
"""The planner's formulas count all that the repository's models send; the rest is timed.

The list is the measured one of forecast/traffic.py: where a layer sends more than the formulas
count, this test fails, or the planner's seconds grow.
"""

from dataclasses import replace

import numpy as np
import pytest

from mpu.grid import Grid
from mpu.launch import Launch
from tools.planner import search, transfers
from tools.planner.cluster import read_cluster
from tools.planner.layout import Layout
from tools.planner.model import read_model
from tools.planner.step_time import links
from tools.rehearsal import links as cost


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [("8B", 1, 0), ("8B", 4, 0), ("1B", 8, 0), ("70B", 2, 0), ("MIXTRAL-8X7B", 2, 2),
     ("MIXTRAL-8X7B", 2, 8), ("QWEN3-30B-A3B", 1, 16), ("QWEN3-30B-A3B", 4, 4)],
)  # fmt: skip
def test_the_formulas_count_all_that_the_models_send(name, tp, ep, cut):
    assert transfers.unnamed_of(read_model(name, 4096).flags, tp, cut, ep) == ({}, {}, {})


@pytest.mark.parametrize(("name", "tp", "cut"), [("8B", 4, False), ("70B", 2, True)])
def test_and_not_more(name, tp, cut):
    config = transfers.unit_config(read_model(name, 4096).flags, tp, "", cp=1 + cut)
    assert transfers.layer_of(config) == transfers.named_of(config)


def test_ranks_that_share_a_head_are_timed():
    """16 ranks of tp with 8 key/value heads gather them in pairs: no formula has that."""
    model, cluster = read_model("8B", 4096), read_cluster("h100_8_nodes")
    layout = Layout(tp=16, pp=1, virtual=1, dp=4, micro_batch=2, micro_batches=1, zero=1,
                    recompute="none")  # fmt: skip
    runs, c = search.runs_of(model, cluster, [layout]), search._constants(cluster)
    found = transfers.unnamed(c, model, [layout], runs)
    part = 2 * 2 * 4096 * 128 // 2 * 2  # half of K and V of one head, of two sequences, in bf16
    pair = cost.strided(np.array([2.0]), np.array([1.0]), np.array([8.0]))
    both = [("all_gather", part), ("reduce_scatter", 2 * part)]
    wanted = sum(cost.collective(links(c, runs), verb, sent, 2.0, pair) for verb, sent in both)
    assert found.layer.tp == pytest.approx(np.broadcast_to(wanted, 1))
    assert not any(found.head) and not any(found.first)


def test_the_groups_of_an_axis_are_the_grids():
    model = read_model("MIXTRAL-8X7B", 4096)
    layout = Layout(tp=4, cp=2, ep=2, pp=1, virtual=1, dp=4, micro_batch=1, micro_batches=1, zero=1,
                    recompute="none")  # fmt: skip
    runs = search.runs_of(model, read_cluster("h100_8_nodes"), [layout])
    grid = Grid(32, 4, 2, launch=Launch(0, 32), ep_size=2)
    for name in ("tp", "cp", "dp", "dp_cp", "ep", "edp", "world"):
        first, second, *_ = ranks = getattr(grid, name).ranks
        size, inner = transfers._ranks(runs, name)
        assert (size.item(), inner.item()) == (len(ranks), second - first), name
    runs = search.runs_of(read_model("8B", 4096), read_cluster("h100_8_nodes"),
                          [replace(layout, tp=16, ep=0)])  # fmt: skip
    shared = Grid(128, 16, 2, launch=Launch(0, 128), query_groups=8).tp_kv.ranks
    assert [each.item() for each in transfers._ranks(runs, "tp_kv")] == [len(shared), 1]
