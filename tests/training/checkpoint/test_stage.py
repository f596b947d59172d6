# SPDX-License-Identifier: Apache-2.0
"""A background save has the values of the moment it was asked for, and reports its own errors."""

import threading
from pathlib import Path

import pytest
import torch

from mpu.grid import Grid
from training.checkpoint import SaveError, find_latest, load, save
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
