# SPDX-License-Identifier: Apache-2.0
"""Read what a test's run saved, whatever layout saved it, and compare it to the bit."""

from pathlib import Path

import torch

from mpu.grid import Grid
from training.checkpoint import find_latest
from training.checkpoint.huggingface import BY_NAME
from training.checkpoint.pieces import whole


def tensors(saved: Path, step: int) -> dict[str, torch.Tensor]:
    """Read all of a checkpoint: weights and the optimizer's state, each tensor whole."""
    found = find_latest(saved, Grid(), step=step)
    assert found is not None
    pieces = [
        whole(name, torch.empty(entry["shape"], dtype=BY_NAME[entry["dtype"]]))
        for name, entry in found.index.items()
    ]
    found.read(pieces)
    return {piece.name: piece.tensor for piece in pieces}


def check_equal(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> None:
    assert here.keys() == there.keys()
    assert [name for name in here if not torch.equal(here[name], there[name])] == []
