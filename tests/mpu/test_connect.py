# SPDX-License-Identifier: Apache-2.0
"""What carries an axis once the ranks have looked for memory: nothing else of it changes."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from mpu import connect
from mpu.comm.collectives import ProcessGroupTransport, group_of
from mpu.comm.symmetric import Unavailable
from mpu.grid import Grid
from mpu.launch import Launch

WAIT = timedelta(seconds=1)


def two_ranks(staged: bool) -> Grid:
    """Return the grid of rank 0 of 2, whose process group is a word."""
    grid = Grid(2, 2, launch=Launch(0, 2))
    transport = ProcessGroupTransport("the group", staged)
    grid.tp, grid.world = (replace(axis, transport=transport) for axis in (grid.tp, grid.world))
    return grid


@pytest.fixture(autouse=True)
def triton_runs(monkeypatch):
    """Nothing is launched here: kernels.available launches a kernel where a GPU is."""
    monkeypatch.setattr(connect.available, "why_not", lambda: "")


def refuse(*about):
    raise Unavailable("the hosts differ")


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("found", [True, False])
def test_on_gpus_the_group_and_its_staging_stay(monkeypatch, staged, found):
    cuda = pytest.importorskip("mpu.comm.symmetric_cuda", reason="needs triton")
    workspace = SimpleNamespace()
    monkeypatch.setattr(cuda, "CudaWorkspace", (lambda *about: workspace) if found else refuse)
    grid = two_ranks(staged)
    (line,) = connect.share_gpus(grid, torch.device("cpu"), WAIT)
    assert group_of(grid.tp) == "the group" and grid.tp.staged == staged
    assert grid.tp.symmetric == found
    if found:
        assert grid.tp.transport.workspace is workspace and line.endswith("symmetric memory")
    else:
        assert grid.tp.transport.why_not == "the hosts differ" and "the hosts differ" in line


@pytest.mark.parametrize("ranks", [2, 4])
def test_sms_are_left_where_another_axis_communicates(monkeypatch, ranks):
    cuda = pytest.importorskip("mpu.comm.symmetric_cuda", reason="needs triton")
    left = []
    monkeypatch.setattr(cuda, "CudaWorkspace", lambda *about: left.append(about[-1]))
    grid = Grid(ranks, 2, launch=Launch(0, ranks))
    grid.tp = replace(grid.tp, transport=ProcessGroupTransport("the group"))
    connect.share_gpus(grid, torch.device("cpu"), WAIT)
    assert left == [1 if ranks == 2 else cuda.SMS_LEFT]


def test_on_gpus_without_triton_the_group_stays(monkeypatch):
    monkeypatch.setattr(connect.available, "why_not", lambda: "Triton cannot launch a kernel")
    grid = two_ranks(False)
    (line,) = connect.share_gpus(grid, torch.device("cpu"), WAIT)
    assert not grid.tp.symmetric and "Triton cannot launch a kernel" in line


def test_on_gpus_a_pipeline_does_without():
    pytest.importorskip("mpu.comm.symmetric_cuda", reason="needs triton")
    grid = Grid(4, 2, pp_size=2, launch=Launch(0, 4))
    grid.tp = replace(grid.tp, transport=ProcessGroupTransport("the group"))
    (line,) = connect.share_gpus(grid, torch.device("cpu"), WAIT)
    assert not grid.tp.symmetric and "pipeline-model-parallel-size 2 must be 1" in line
    assert grid.tp.transport.why_not in line  # which the lines about overlap repeat


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("found", [True, False])
def test_on_a_host_the_group_and_its_staging_stay(monkeypatch, staged, found):
    class Shared:
        def __init__(self, axis, timeout, ranks):
            assert not axis.symmetric and ranks == grid.launch.local_world
            if not found:
                refuse()

    monkeypatch.setattr(connect, "Workspace", Shared)
    grid = two_ranks(staged)
    (line,) = connect.share(grid, WAIT)  # the world is the same two ranks
    assert ("shared memory" in line) == found
    for axis in (grid.tp, grid.world):
        assert group_of(axis) == "the group" and axis.staged == staged and axis.symmetric == found
