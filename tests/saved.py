# SPDX-License-Identifier: Apache-2.0
"""Read what a test's run saved, in whatever layout, and compare it bit for bit."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from mpu.grid import Grid
from training.checkpoint import find_latest
from training.checkpoint.header import BY_NAME
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


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Put a checkpoint's tensors together without the product's code.

    Every element of every tensor must be there once, and nothing else in the files of tensors.
    """
    files = {path.name: path for path in directory.glob("*.safetensors")}
    left, opened = set(), {}
    for name, path in files.items():
        opened[name] = safe_open(str(path), framework="pt")
        left |= {(name, key) for key in opened[name].keys()}  # noqa: SIM118 (not a dict)
    found, numbers = {}, dict.fromkeys(files, 0)
    for name, entry in json.loads((directory / "index.json").read_text()).items():
        found[name] = torch.empty(entry["shape"], dtype=BY_NAME[entry["dtype"]])
        times = torch.zeros(entry["shape"], dtype=torch.int32)
        for file, key, starts, sizes in entry["parts"]:
            left.remove((file, key))
            part = opened[file].get_tensor(key)
            assert part.dtype == found[name].dtype and list(part.shape) == sizes
            at = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
            found[name][at] = part
            times[at] += 1
            numbers[file] += part.nbytes
        assert (times == 1).all(), f"{name}: {int((times != 1).sum())} elements not once"
    assert not left, f"{sorted(left)[:3]} are in no tensor"
    for name, path in files.items():
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == 8 + header + numbers[name], name
    return found


def check_equal(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> None:
    assert here.keys() == there.keys()
    assert [name for name in here if not torch.equal(here[name], there[name])] == []
