# SPDX-License-Identifier: Apache-2.0
"""A background save has the values of the moment it was asked for, and reports its own errors."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mpu.comm.collectives import all_reduce
from mpu.grid import Grid
from training.checkpoint import NamedPiece, SaveError, find_latest, load, save
from training.checkpoint.pieces import whole
from training.checkpoint.stage import Background, Staging


def test_what_is_written_is_what_was_copied(tmp_path: Path) -> None:
    """The trainer goes on at once: its next update must not be in the checkpoint."""
    weights = [whole("a", torch.ones(5, 3)), whole("b", torch.full((7,), 2.0).bfloat16())]
    staging, background, go = Staging(weights), Background(), threading.Event()
    copies = staging.copy(weights)

    def work() -> None:
        go.wait(10)
        save(tmp_path, step=1, pieces=copies, state={}, grid=Grid())

    background.start(work)
    for piece in weights:
        piece.tensor.fill_(-9.0)
    background.poll()  # not over, so nothing is said
    go.set()
    background.wait()
    blank = [whole("a", torch.zeros(5, 3)), whole("b", torch.zeros(7).bfloat16())]
    found = find_latest(tmp_path, Grid(), pieces=blank)
    assert found is not None
    load(found, blank, Grid())
    assert torch.equal(blank[0].tensor, torch.ones(5, 3))
    assert torch.equal(blank[1].tensor, torch.full((7,), 2.0).bfloat16())


def test_an_error_comes_once_and_only_when_it_is_over() -> None:
    background, go = Background(), threading.Event()

    def work() -> None:
        go.wait(10)
        raise SaveError("the disk is full")

    background.start(work)
    background.poll()
    go.set()
    with pytest.raises(SaveError, match="full"):
        background.wait()
    background.wait()
    background.poll()
    background.start(lambda: None)
    background.wait()


def test_work_waits_for_earlier_work() -> None:
    background, go, order = Background(), threading.Event(), []

    def first() -> None:
        go.wait(10)
        order.append(1)

    background.start(first)
    background.start(lambda: order.append(2))
    go.set()
    background.wait()
    assert order == [1, 2]


def save_and_train(comm: Any, root: str) -> list[float]:
    """Save in the background, over and over, while the trainer's own collectives go on."""
    grid = comm.grid()
    from datetime import timedelta

    grid.add_background(timedelta(seconds=60))
    mine = [
        NamedPiece("t", (64, 33), (32 * comm.rank, 0), (32, 33), torch.zeros(32, 33)),
        NamedPiece("both", (40,), (0,), (40,), torch.zeros(40), (grid.dp_cp,)),
    ]
    staging, background, sums = Staging(mine), Background(), []
    for step in range(1, 5):
        background.wait()
        for piece in mine:
            piece.tensor.fill_(step)
        copies = staging.copy(mine)

        def work(step: int = step, copies: Any = copies) -> None:
            save(root, step=step, pieces=copies, state={}, grid=grid, world=grid.background)

        background.start(work)
        for i in range(50):  # on the training group, in another order than the thread's
            x = torch.full((1000,), float(comm.rank + i))
            all_reduce(x, grid.world)[1].wait()
            sums.append(x[0].item())
            mine[0].tensor.add_(1.0)
    background.wait()
    found = find_latest(root, grid, pieces=mine)
    assert found is not None and found.step == 4
    load(found, mine, grid)
    assert all(set(p.tensor.flatten().tolist()) == {4.0} for p in mine)
    return sums


def test_it_does_not_disturb_the_trainers_collectives(world: Any, tmp_path: Path) -> None:
    expected = [2.0 * i + 1 for _ in range(4) for i in range(50)]
    assert world(2).run(save_and_train, str(tmp_path)) == [expected, expected]
    assert sorted(p.name for p in tmp_path.glob("step_*")) == [f"step_{i:08d}" for i in range(1, 5)]
