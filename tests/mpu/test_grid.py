# SPDX-License-Identifier: Apache-2.0
"""The grid is one reshape: ranks are where the docstring says, and products of axes are planes."""

import pytest
import torch

from mpu.comm.collectives import all_gather
from mpu.grid import Grid
from mpu.launch import Launch


def test_eight_ranks_of_the_docstring():
    grids = [Grid(8, 2, 1, 2, Launch(r, 8)) for r in range(8)]
    assert {g.tp.ranks for g in grids} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {g.dp.ranks for g in grids} == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert {g.pp.ranks for g in grids} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert {g.embd.ranks for g in grids} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert all(g.world.ranks == tuple(range(8)) for g in grids)
    assert all(
        axis.ranks[axis.rank] == g.rank
        for g in grids
        for axis in (g.tp, g.dp, g.pp, g.dp_cp, g.embd)
    )


def test_the_ends_of_a_pipeline_are_its_first_and_last_rank():
    grids = [Grid(8, 2, 1, 4, Launch(r, 8)) for r in range(8)]
    assert [g.embd.ranks for g in grids] == [(0, 6), (1, 7), (2,), (3,), (4,), (5,), (0, 6), (1, 7)]
    assert [g.embd.rank for g in grids] == [0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "world, tp, cp, pp", [(6, 2, 1, 2), (4, 3, 1, 1), (2, 4, 1, 1), (4, 0, 1, 1)]
)
def test_a_world_that_does_not_factor_is_refused(world, tp, cp, pp):
    with pytest.raises(ValueError, match=f"world of {world} ranks"):
        Grid(world, tp, cp, pp)


def _gather_names(comm, tp, cp, pp):
    grid = comm.grid(tp, cp, pp)
    mine = torch.tensor([comm.rank])
    return {
        n: (getattr(grid, n).ranks, all_gather(mine, getattr(grid, n))[0].tolist())
        for n in grid.AXES
    }


def test_groups_connect_the_ranks_of_their_axis(world):
    for layout in ((2, 1, 1), (1, 2, 1), (4, 1, 1), (1, 1, 1), (1, 1, 4), (2, 1, 2), (1, 1, 2)):
        for seen in world(4).run(_gather_names, *layout):
            for ranks, gathered in seen.values():
                assert gathered == list(ranks)
