# SPDX-License-Identifier: Apache-2.0
"""Rings and levels from matrices: exact for few ranks, against every ring."""

import itertools
import json
import random

import numpy as np
import pytest

from forecast.planner.cluster import content_of, read_cluster
from tools.topology.levels import blocks_of, levels_of
from tools.topology.measure import rounds
from tools.topology.rings import EXACT, all_rings, best_rings, edges, ring_seconds


def by_hand(cost: np.ndarray, ring: tuple[int, ...]) -> float:
    """The recurrence, rank by rank: what a place has at step k it may send on at step k + 1."""
    n = len(ring)
    has = [[0.0] * n for _ in range(n)]
    for k in range(1, n):
        for i in range(n):
            before = (i - 1) % n
            arrived = has[k - 1][before] + cost[ring[before], ring[i]]
            sent = has[k - 1][i] + cost[ring[i], ring[(i + 1) % n]]
            has[k][i] = max(arrived, sent)
    return max(has[n - 1])


def some_cost(n: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return edges(draw.uniform(1e-5, 1e-3, (n, n)), draw.uniform(1e8, 1e10, (n, n)), 1e6)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_the_best_ring_is_the_best_of_all(n: int) -> None:
    for seed in range(5):
        cost = some_cost(n, seed)
        every = [(0, *rest) for rest in itertools.permutations(range(1, n))]
        assert sorted(all_rings(n)) == sorted(every)
        best = min(by_hand(cost, ring) for ring in every)
        found = best_rings(cost, 3)
        assert by_hand(cost, found[0]) == pytest.approx(best)
        assert ring_seconds(cost, found[0]) == pytest.approx(best)
        assert [ring_seconds(cost, r) for r in found] == sorted(
            ring_seconds(cost, r) for r in found
        )


def test_a_large_ring_finds_hosts_that_were_shuffled() -> None:
    """24 ranks on 6 hosts, dealt out: a ring that crosses each host's link once is there."""
    n, each = 24, 4
    assert n > EXACT
    hosts = [i // each for i in range(n)]
    random.Random(3).shuffle(hosts)
    home = np.array(hosts)
    cost = np.where(home[:, None] == home[None, :], 1.0, 5.0)
    ring = best_rings(cost)[0]
    crossings = sum(home[a] != home[b] for a, b in zip(ring, ring[1:] + ring[:1], strict=True))
    assert sorted(ring) == list(range(n)) and crossings == 6
    usual = sum(home[a] != home[(a + 1) % n] for a in range(n))
    assert usual > 12


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
