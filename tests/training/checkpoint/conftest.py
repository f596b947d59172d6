# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of checkpoints: a tiny checkpoint whose tensors all have its step's value."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpu.grid import Grid
from tests.launcher import Launcher
from training.checkpoint import find_latest, load, save
from training.checkpoint.pieces import NamedPiece, whole


def _tensors(value: float) -> list[NamedPiece]:
    return [whole(name, torch.full((5, 3), float(value))) for name in ("a", "b")]


@pytest.fixture
def write() -> Callable[..., Path]:
    """write(root, step) -> the directory of a new checkpoint."""

    def write(root: Path, step: int, more: dict[str, Any] | None = None, **how: Any) -> Path:
        state = {"step": step, **(more or {})}
        return save(root, step=step, pieces=_tensors(step), state=state, grid=Grid(), **how)

    return write


@pytest.fixture
def newest() -> Callable[[Path], tuple[int, list[str]]]:
    """newest(root) -> the step that is found, its tensors compared, and the notes."""

    def newest(root: Path) -> tuple[int, list[str]]:
        notes: list[str] = []
        pieces = _tensors(-1)
        found = find_latest(root, Grid(), pieces=pieces, note=notes.append)
        assert found is not None
        load(found, pieces, Grid())
        values = {v for p in pieces for v in p.tensor.flatten().tolist()}
        assert values == {float(found.step)}
        return found.step, notes

    return newest


@pytest.fixture
def python(launcher: Launcher) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """python(code, *args) -> a finished process that ran it."""
    return lambda code, *args: launcher.python("-c", code, *args)
