# SPDX-License-Identifier: Apache-2.0
"""The grid is one reshape: ranks are where the docstring says, and products of axes are planes."""

import json
from datetime import timedelta
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

import mpu.grid as grid_module
from mpu.comm.collectives import all_gather, group_of
from mpu.comm.waits import Wait
from mpu.grid import ORDER, Grid
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
    assert {g.embd.name for g in grids} == {"embd"}


def test_ranks_in_a_row_share_a_key_value_head():
    grids = [Grid(8, 4, launch=Launch(r, 8), query_groups=2) for r in range(8)]
    rows = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    assert [g.tp_kv.ranks for g in grids] == rows
    assert [g.tp_kv.rank for g in grids] == [0, 1] * 4
    assert Grid(4, 4, launch=Launch(0, 4), query_groups=1).tp_kv.ranks == (0, 1, 2, 3)
    for groups in (0, 4, 8):
        assert Grid(4, 4, launch=Launch(0, 4), query_groups=groups).tp_kv.size == 1
    with pytest.raises(ValueError, match="3 query groups do not divide 4 tensor-parallel ranks"):
        Grid(4, 4, launch=Launch(0, 4), query_groups=3)


def test_another_order_of_the_axes():
    order = ("tp", "cp", "pp", "dp")  # Megatron's --use-tp-pp-dp-mapping
    grids = [Grid(8, 2, 1, 2, Launch(r, 8), order=order) for r in range(8)]
    assert {g.tp.ranks for g in grids} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {g.pp.ranks for g in grids} == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert {g.dp.ranks for g in grids} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert str(grids[0]).endswith("= 8 ranks, in the order tp-cp-pp-dp")
    assert grids[0].groups("stage").tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("order", list(permutations(ORDER))[::5])
def test_every_order_has_one_rank_at_each_place(order):
    """Ranks ascend along every axis, as torch sorts a group's; all four sizes differ."""
    grids = [Grid(120, 2, 3, 5, Launch(r, 120), order=order) for r in range(120)]
    places = {tuple(getattr(g, name).rank for name in order): g.rank for g in grids}
    assert [places[place] for place in sorted(places, key=lambda p: p[::-1])] == list(range(120))
    for g in grids:
        for name in ("tp", "cp", "dp", "pp", "dp_cp", "world"):
            axis = getattr(g, name)
            assert list(axis.ranks) == sorted(axis.ranks) and axis.ranks[axis.rank] == g.rank
        assert [getattr(g, name).size for name in ("tp", "cp", "dp", "pp")] == [2, 3, 4, 5]


@pytest.mark.parametrize("order", [ORDER, ("tp", "cp", "pp", "dp"), ("dp", "pp", "tp", "cp")])
def test_every_axis_of_each_rank_is_a_group_of_the_list(order):
    """A rank's parts of a stage, written out: neighbours, and those at the same place in each."""
    more = dict(instances=2, query_groups=2, order=order, ep_size=8, needs_full_matrices=True)
    grids = [Grid(128, 4, 4, 2, Launch(r, 128), **more) for r in range(128)]
    for g in grids[::7]:
        stage = next(row for row in g.groups("stage").tolist() if g.rank in row)
        at, own = stage.index(g.rank), g.dp_cp.ranks
        assert g.ep.ranks == tuple(stage[at // 8 * 8 : at // 8 * 8 + 8])
        assert g.edp.ranks == tuple(stage[at % 8 :: 8])
        half = len(own) // 2
        assert g.dp_cp_shard.ranks == (own[:half] if g.rank in own[:half] else own[half:])
        assert g.dp_cp_replicate.ranks == own[own.index(g.rank) % half :: half]
        assert g.tp_kv.ranks == g.tp.ranks[g.tp.rank // 2 * 2 : g.tp.rank // 2 * 2 + 2]
        for cut in ("tp", "ep"):
            ranks = [rank for row in g.places(cut) for rank in row]
            assert g.instance(cut).ranks == tuple(sorted(ranks))
            assert {getattr(grids[rank], cut).ranks for rank in ranks} == set(g.places(cut))
        for name in Grid.AXES:
            wait = Wait("all_gather", name, getattr(g, name).ranks, 3)
            assert Wait.packed(json.loads(json.dumps(wait.pack()))) == wait, name
    for name in {*Grid.AXES} - {"embd"}:
        own = {getattr(g, name).ranks for g in grids}
        assert {*map(tuple, grids[0].groups(name).tolist())} == own, name


@pytest.mark.parametrize(
    "world, tp, cp, pp", [(6, 2, 1, 2), (4, 3, 1, 1), (2, 4, 1, 1), (4, 0, 1, 1)]
)
def test_a_world_that_does_not_factor_is_refused(world, tp, cp, pp):
    with pytest.raises(ValueError, match=f"the world size, {world}, must be a multiple of"):
        Grid(world, tp, cp, pp)


def _gather_names(comm, tp, cp, pp, order=ORDER):
    grid = comm.grid(tp, cp, pp, order=order)
    mine = torch.tensor([comm.rank])
    return {
        n: (getattr(grid, n).ranks, all_gather(mine, getattr(grid, n))[0].tolist())
        for n in grid.AXES
    }


def test_groups_connect_the_ranks_of_their_axis(world):
    for layout in ((1, 2, 1), (1, 1, 1), (2, 1, 2)):
        for seen in world(4).run(_gather_names, *layout):
            for ranks, gathered in seen.values():
                assert gathered == list(ranks)


class Group:
    """A process group of these ranks, by name only."""

    def __init__(self, ranks, pg_options=None, **more):
        self.ranks, self.options = tuple(ranks), pg_options


def meetings(monkeypatch, rank, sizes):
    """Return what a rank of an NCCL world does at start-up: ("all", ranks) or (kind, peer)."""
    world, tp, cp, pp = sizes
    did = []
    monkeypatch.setattr(grid_module.dist, "new_group", Group)
    monkeypatch.setattr(grid_module, "group_options", lambda timeout, urgent, settings: "high")
    everyone = SimpleNamespace(WORLD=Group(range(world)))
    monkeypatch.setattr(grid_module.dist, "group", everyone)
    monkeypatch.setattr(
        grid_module, "barrier", lambda axis, device: did.append(("all", axis.ranks, group_of(axis)))
    )
    monkeypatch.setattr(
        grid_module.dist, "send", lambda x, to, group: did.append(("message", (rank, to), group))
    )
    monkeypatch.setattr(
        grid_module.dist, "recv", lambda x, at, group: did.append(("message", (at, rank), group))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: did.append(("synchronize",)))
    grid = Grid(world, tp, cp, pp, Launch(rank, world), "nccl")
    return grid.add_groups(torch.device("cpu"), timedelta(seconds=1)), did


@pytest.mark.parametrize(
    "sizes", [(8, 2, 1, 2), (8, 2, 1, 4), (8, 1, 2, 2), (4, 1, 1, 1), (4, 4, 1, 1), (6, 1, 1, 3)]
)
def test_every_communicator_exists_before_the_first_step(monkeypatch, sizes):
    """On NCCL: each group with collectives meets once, in an order that ends."""
    to_do = []
    for rank in range(sizes[0]):
        grid, did = meetings(monkeypatch, rank, sizes)
        assert did[-1] == ("synchronize",) and did.count(("synchronize",)) == 1
        met = [group for kind, _, group in did[:-1] if kind == "all"]
        axes = [getattr(grid, name) for name in grid.AXES]
        collective = {group_of(a) for a in axes if a.size > 1 and a.name != "pp_back"}
        assert len(met) == len(set(met)) and set(met) == collective
        to_do.append([(kind, ranks) for kind, ranks, _ in did[:-1]])
    while any(to_do):  # all ranks of the next one must have come to it
        first = next(
            own[0] for own in to_do if own and all(to_do[r][:1] == own[:1] for r in own[0][1])
        )
        for rank in first[1]:
            to_do[rank].pop(0)


@pytest.mark.parametrize(
    "sizes",
    [(8, 2, 1, 2), (8, 2, 2, 1), (4, 1, 4, 1), (8, 2, 1, 4), (8, 8, 1, 1), (8, 4, 1, 2)]
    + [(4, 1, 1, 4), (8, 4, 2, 1)],
)
def test_gradients_have_groups_of_their_own_with_plain_streams(monkeypatch, sizes):
    """On NCCL: what runs beside a matmul has streams of high priority, alone in the world too."""
    for rank in range(sizes[0]):
        grid, _ = meetings(monkeypatch, rank, sizes)
        plain = {group_of(getattr(grid, n)) for n in ("dp_cp", "dp_cp_shard", "world")
                 if getattr(grid, n).size > 1}  # fmt: skip
        assert all(getattr(group, "options", None) is None for group in plain)
        for name in grid_module.URGENT:
            axis = getattr(grid, name)
            if axis.size > 1:
                assert group_of(axis).options == "high" and group_of(axis) not in plain, name


def test_on_gloo_nobody_meets(monkeypatch):
    monkeypatch.setattr(grid_module.dist, "new_group", Group)
    monkeypatch.setattr(grid_module, "barrier", lambda *about: pytest.fail("a meeting"))
    grid = Grid(4, 2, 1, 2, Launch(0, 4), "gloo")
    grid.add_groups(torch.device("cpu"), timedelta(seconds=1))
    assert group_of(grid.tp).options is None


def test_a_group_is_not_bound_to_a_device(monkeypatch):
    """With a device_id all messages of a group would share one communicator."""
    given = {}
    monkeypatch.setattr(
        grid_module.dist, "init_process_group", lambda *about, **more: given.update(more)
    )
    monkeypatch.setattr(Grid, "add_groups", lambda grid, device, timeout: grid)
    grid = Grid(2, 2, launch=Launch(0, 2))
    grid.connect(torch.device("cuda"), None, timedelta(seconds=1))
    assert grid.backend == "nccl" and given and "device_id" not in given


@pytest.mark.parametrize(("backend", "later"), [("nccl", 120), ("gloo", 0)])
def test_the_watchdog_of_nccl_comes_after_the_hang_watch(monkeypatch, backend, later):
    """It ends every rank that waits, and would leave no one to name the rank that hangs."""
    given = []

    def group(ranks, timeout, pg_options=None, **more):
        given.extend([timeout, getattr(pg_options, "_timeout", timeout)])
        return Group(ranks)

    class Options:
        def __init__(self, is_high_priority_stream):
            assert is_high_priority_stream

    def world(backend, timeout, **more):
        given.append(timeout)

    def message(number, peer, group):
        return None

    for name, function in (("send", message), ("recv", message), ("new_group", group),
                           ("init_process_group", world)):  # fmt: skip
        monkeypatch.setattr(grid_module.dist, name, function)
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(grid_module.dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(grid_module, "barrier", lambda axis, device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(grid_module.dist, "group", SimpleNamespace(WORLD=Group(range(8))))
    grid = Grid(8, 2, 1, 2, Launch(0, 8), backend)
    grid.connect(torch.device("cpu"), None, timedelta(minutes=10))
    assert len(given) > 5 and set(given) == {timedelta(minutes=10, seconds=later)}


def test_a_grid_takes_its_rank_from_the_launcher(monkeypatch):
    """Without `launch` a grid is no longer rank 0 in every process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert Grid().rank == 0 and Grid(1).tp.size == 1
    with pytest.raises(ValueError, match="the rank of this process is not known"):
        Grid(2, 2)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    grid = Grid(4, 2)
    assert grid.rank == 3 and grid.tp.rank == 1 and grid.dp.rank == 1
    with pytest.raises(ValueError, match="a grid of 2 ranks, but the launcher started 4"):
        Grid(2, 2)
    assert Grid(1).rank == 0  # one process's own grid, in any world
    assert Grid(2, 2, launch=Launch(1, 2)).tp.rank == 1
