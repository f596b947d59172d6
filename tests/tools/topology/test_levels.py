# SPDX-License-Identifier: Apache-2.0
"""Levels of links from matrices, and the rounds in which pairs are measured."""

import itertools
import json

import numpy as np
import pytest

from forecast.planner.cluster import content_of, read_cluster
from tools.topology.levels import blocks_of, edges, levels_of
from tools.topology.measure import rounds


def test_every_two_ranks_meet_once_and_nobody_twice_at_a_time() -> None:
    for n in (2, 3, 4, 7, 8):
        met = []
        for pairs in rounds(n):
            busy = [rank for pair in pairs for rank in pair]
            assert len(busy) == len(set(busy))
            met += pairs
        assert sorted(met) == list(itertools.combinations(range(n), 2))


@pytest.mark.parametrize(
    ("node", "sizes"), [(2, [2, 4, 8, 16]), (1, [2, 4, 8, 16]), (4, [4, 8, 16]), (16, [16])]
)
def test_levels_are_the_blocks_that_were_built(node: int, sizes: list[int], tmp_path) -> None:
    n, place = 16, np.arange(16)
    level = sum(place[:, None] // size != place[None, :] // size for size in sizes[:-1])
    level = level if len(sizes) > 1 else np.zeros((n, n), dtype=int)
    draw = np.random.default_rng(0)
    alpha = 1e-5 * 2.0**level * draw.uniform(0.95, 1.05, (n, n))
    beta = 1e11 / 4.0**level * draw.uniform(0.95, 1.05, (n, n))
    assert blocks_of(edges(alpha, beta, 1 << 20), node) == sizes
    found = levels_of(alpha, beta, node)
    assert [each.gpus for each in found] == [*sizes[:-1], 0]
    for k, each in enumerate(found):
        assert each.bandwidth == pytest.approx(1e11 / 4.0**k, rel=0.06)
        assert each.latency == pytest.approx(1e-5 * 2.0**k, rel=0.06)
    content = content_of("probed", "h100", n // node, node, found, "written by this test")
    (tmp_path / "c.json").write_text(json.dumps(content))
    cluster = read_cluster(str(tmp_path / "c.json"))
    assert [each.gpus for each in cluster.levels] == [each.gpus for each in found]
    assert cluster.levels[-1].bandwidth == pytest.approx(found[-1].bandwidth)


def test_ranks_that_are_all_as_near_have_one_level() -> None:
    alpha, beta = np.full((6, 6), 1e-5), np.full((6, 6), 1e9)
    assert [level.gpus for level in levels_of(alpha, beta, 1)] == [0]
