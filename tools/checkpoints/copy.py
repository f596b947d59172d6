# SPDX-License-Identifier: Apache-2.0
"""Open a checkpoint for the tools, and stream its tensors, one at a time, into a new one."""

import sys
from collections.abc import Callable, Container, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.load import model_file_of, read_sizes
from mpu.grid import Grid
from training.checkpoint import Checkpoint, CheckpointError, NamedPiece, find_latest
from training.checkpoint import save as save_checkpoint
from training.checkpoint.files import read_checked
from training.checkpoint.find import candidates
from training.checkpoint.header import BY_NAME
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.manifest import INDEX, STATE
from training.checkpoint.pieces import whole
from training.untrusted import nothing_downloaded, printable

Say = Callable[[str], None]


def from_hf(config: dict[str, Any], own: str | None = None) -> dict[str, Any]:
    """Convert a Hugging Face config.json to the form of our checkpoints. own: a fork's file."""
    file = model_file_of(config, own=own)
    return file.hf_config(read_sizes(file, config))


def warn(line: str) -> None:
    """Print a warning or an error to stderr, apart from the tool's own output."""
    print(f"checkpoint: {printable(line.removeprefix('checkpoint '))}", file=sys.stderr)


class Room:
    """Memory that one tensor after another reuses. With a malloc for each of thousands of tensors
    of some MB, the holes in the heap would add up to the whole model."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in the memory of the one before."""
        size = prod(shape) * dtype.itemsize
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(*shape)


def open_newest(place: Path, hashed: bool, note: Say = warn, finite: bool = True) -> Checkpoint:
    """Open a step's directory, the newest whole step of a run, or a Hugging Face directory.

    hashed: hash every file first and pass over a damaged checkpoint, as a resume does.
    finite: pass over one that holds a value that is not, too.
    Raises CheckpointError where there is none.
    """

    def suits(found: Checkpoint) -> None:
        if hashed:
            found.verify(found.manifest["files"], finite)

    found = find_latest(place, Grid(), flag="checkpoint", suits=suits, from_hf=from_hf, note=note)
    if found is None:
        why = nothing_downloaded(place)
        raise CheckpointError(f"{place}: there is no checkpoint ({why})")
    return found


def stream(
    checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype | None = None
) -> list[NamedPiece]:
    """Return whole tensors as pieces that are read when they are written, in `dtype` or as stored.

    A tensor that was read is valid until the next one is read.
    """
    read, converted = Room(), Room()

    def piece(name: str) -> NamedPiece:
        entry = checkpoint.index[name]
        shape, stored = tuple(entry["shape"]), BY_NAME[entry["dtype"]]

        def fetch() -> Tensor:
            target = whole(name, read.tensor(shape, stored))
            checkpoint.read([target])
            if dtype in (None, stored):
                return target.tensor
            return converted.tensor(shape, dtype).copy_(target.tensor)

        return whole(name, torch.empty(shape, dtype=dtype or stored, device="meta"), fetch)

    return [piece(name) for name in names]


def check_empty(root: Path) -> None:
    """Raise ValueError where `root` has checkpoints: a resume could not tell whose is whose."""
    if root.is_dir() and candidates(root, None)[0]:
        raise ValueError(f"--save {root} already holds checkpoints; choose another directory")


def attached(checkpoint: Checkpoint, names: Container[str] | None = None) -> dict[str, bytes]:
    """Return {name: bytes} of a checkpoint's small files beside its tensors: all or of `names`."""
    files = checkpoint.manifest["files"]
    return {
        name: read_checked(checkpoint.directory / name, files[name])
        for name in files
        if name not in (INDEX, STATE) and not name.endswith(".safetensors")
        if names is None or name in names
    }


def consolidate(place: Path, root: Path, file_bytes: int) -> tuple[Path, Path]:
    """Write the newest whole checkpoint again as one writer would have: whole tensors, few files.

    Return the directories read and written. Raises CheckpointError, SaveError, ValueError.
    """
    found = open_newest(place, hashed=True)
    if isinstance(found, HuggingFaceDirectory):
        raise ValueError(f"{place} is a Hugging Face directory: use convert --from-hf")
    check_empty(root)
    made = save_checkpoint(
        root,
        step=found.step,
        pieces=stream(found, found.index),
        state=found.state,
        grid=Grid(),
        attach=attached(found),
        file_bytes=file_bytes,
    )
    return found.directory, made
