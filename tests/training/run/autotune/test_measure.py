# SPDX-License-Identifier: Apache-2.0
"""auto chooses the fastest method, the same on every rank: from made-up times, and from real."""


import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpu.context import LayerContext
from training.run.autotune.measure import LEAST, MARGIN, Projection, choose, measure, tune

A = Projection(True, 6, 5, 7, torch.float32)
B = Projection(False, 6, 7, 5, torch.float32)
PATHS = ["none", "ring", "symmetric"]
seconds = st.floats(1e-6, 1e3)


def test_the_matmuls_of_a_projection_have_the_names_that_layers_look_up():
    assert A.forward == "gather 6x5 -> 7 float32" and A.backward == "scatter 6x7 -> 5 float32"
    assert B.forward == "scatter 6x7 -> 5 float32" and B.backward == "gather 6x5 -> 7 float32"


@given(st.dictionaries(st.text(), st.fixed_dictionaries(dict.fromkeys(PATHS, seconds))))
def test_a_choice_is_never_slower_than_none(times):
    choices = choose(times)
    assert choices.keys() == times.keys()
    for name, path in choices.items():
        spent = times[name]
        if path == "none":
            assert all(spent["none"] * (1 - MARGIN) <= other for other in spent.values())
        else:
            assert spent[path] == min(spent.values()) < spent["none"] * (1 - MARGIN)


def made_up(p, paths, ctx, budget):
    """Say other times on every rank; what is fastest depends on whom you ask."""
    assert not calls.count(p), "measured twice"
    calls.append(p)
    assert list(paths) == PATHS and budget > 0
    forward = {"none": 5.0, "ring": 4.0 + 2 * ctx.tp.rank, "symmetric": 4.5}
    backward = {"none": 8.0 - ctx.tp.rank, "ring": 7.95, "symmetric": 9.0}
    return {path: (forward[path], backward[path]) for path in paths}


calls: list[Projection] = []


def all_together(comm, tp, stages):
    """Tune; the second half of the world has other layers where there are stages."""
    calls.clear()
    grid = comm.grid(tp, pp=stages)
    mine = [A, A, A] if grid.pp.rank == 0 else [B]
    return tune(mine, PATHS, LayerContext(grid, True), made_up)


def test_all_ranks_come_to_the_same_by_the_slowest(world):
    results = world(2).run(all_together, 2, 1)
    want = {
        A.forward: {"none": 5.0, "ring": 6.0, "symmetric": 4.5},  # rank 0 alone would take ring
        A.backward: {"none": 8.0, "ring": 7.95, "symmetric": 9.0},  # less than the margin
    }
    assert results == [want, want]
    assert choose(want) == {A.forward: "symmetric", A.backward: "none"}


def test_stages_of_a_pipeline_hear_of_each_others_layers(world):
    results = world(4).run(all_together, 2, 2)
    assert all(result == results[0] for result in results)
    assert results[0].keys() == {A.forward, A.backward, B.forward, B.backward}


def two_layers_with_one_matmul(comm):
    calls.clear()
    grid = comm.grid(2)
    return tune([A, B], PATHS, LayerContext(grid, True), made_up)


def test_times_of_a_matmul_that_two_layers_share_add_up(world):
    times = world(2).run(two_layers_with_one_matmul)[0]
    assert times[A.forward]["none"] == 5.0 + 8.0  # A's forward, B's backward
    assert times[A.forward].keys() == set(PATHS)


def real_times(comm, dtype):
    grid = comm.grid(comm.size, memory=True)
    torch.manual_seed(7)
    before, out = torch.get_rng_state(), []
    for column, (k, width) in ((True, (5, 7)), (False, (7, 5))):
        p = Projection(column, 3, k, width, dtype)
        out.append(measure(p, PATHS, LayerContext(grid, True), 0.0))
    assert torch.equal(torch.get_rng_state(), before), "the random state was touched"
    return out


@pytest.mark.parametrize(
    "size, dtype",
    [(2, torch.float32), pytest.param(4, torch.bfloat16, marks=pytest.mark.prove)],
)
def test_real_times_of_every_path(world, size, dtype):
    assert LEAST >= 3
    for result in world(size).run(real_times, dtype):
        for found in result:
            assert list(found) == PATHS
            assert all(0 < t < 60 for spent in found.values() for t in spent)
