# SPDX-License-Identifier: Apache-2.0
"""Open checkpoints for the tools, and rewrite them."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from model.load import model_file_of, read_sizes
from mpu.grid import Grid
from training.checkpoint import (
    Checkpoint,
    NamedPiece,
    find_latest,
    refuse_to_save,
)
from training.checkpoint import save as save_checkpoint
from training.checkpoint.find import at_or_below, candidates, nothing_at
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.lock import DirectoryLock
from training.checkpoint.stream import attached, stream
from training.files.untrusted import printable
from training.run.waiting import Progress

Say = Callable[[str], None]


def from_hf(config: dict[str, Any], own: str | None = None) -> dict[str, Any]:
    """Convert a Hugging Face config.json to the form of our checkpoints. own: a fork's file."""
    file = model_file_of(config, own=own)
    return file.hf_config(read_sizes(file, config))


def warn(line: str) -> None:
    """Print a warning or an error to stderr, separate from the tool's own output."""
    print(f"checkpoint: {printable(line.removeprefix('checkpoint '))}", file=sys.stderr)


def open_newest(
    place: Path,
    hashed: bool,
    note: Say = warn,
    finite: bool = True,
    progress: Progress | None = None,
    flag: str = "checkpoint",
    own: str | None = None,
) -> Checkpoint:
    """Open a step's directory, the newest whole step of a run, or a Hugging Face directory.

    hashed: hash every file first and skip a damaged checkpoint, as a resume does.
    finite: also skip one that contains a non-finite value.
    flag: the flag that named `place`, for messages. own: a fork's file.
    Raises CheckpointError if there is none.
    """

    def suits(found: Checkpoint) -> None:
        if hashed:
            if progress is not None:
                progress.begin(f"checking the files of {found.directory.name}")
            found.verify(found.manifest["files"], finite)

    place, read = at_or_below(place, flag), partial(from_hf, own=own)
    found = find_latest(place, Grid(), flag=flag, suits=suits, from_hf=read, note=note)
    if found is None:
        raise nothing_at(flag, place)
    return found


def counted(pieces: Iterable[NamedPiece], progress: Progress) -> list[NamedPiece]:
    """Return the same pieces; `progress` counts the fetched bytes."""
    every = list(pieces)
    progress.begin("writing", sum(piece.nbytes for piece in every), "B")

    def of(piece: NamedPiece) -> NamedPiece:
        def fetch() -> Tensor:
            data = piece.data()
            progress.add(piece.nbytes)
            return data

        return replace(piece, fetch=fetch)

    return [of(piece) for piece in every]


def save_new(root: Path, pieces: Iterable[NamedPiece], progress: Progress, **words: Any) -> Path:
    """Save a checkpoint in a run's directory that has none, under its lock; return its path.

    pieces: fetched when they are written, which progress counts. words: other arguments of `save`.
    Raises ValueError if there are checkpoints already, as a resume could not tell them apart, if
    the directory belongs to another program, or if a run is writing there.
    """
    refuse_to_save(root, "--save")
    if root.is_dir() and candidates(root, None, "--save")[0]:
        raise ValueError(f"--save {root} already holds checkpoints; choose another directory")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = DirectoryLock(root, warn, patience=0)
    try:
        return save_checkpoint(root, grid=Grid(), pieces=counted(pieces, progress), **words)
    finally:
        lock.close(undo=True)


def consolidate(place: Path, root: Path, file_bytes: int, progress: Progress) -> tuple[Path, Path]:
    """Rewrite the newest whole checkpoint as one writer would have: whole tensors, few files.

    Return the directories read and written. Raises CheckpointError, SaveError, ValueError.
    """
    found = open_newest(place, hashed=True, progress=progress)
    if isinstance(found, HuggingFaceDirectory):
        raise ValueError(f"{place} is a Hugging Face directory: use convert --from-hf")
    made = save_new(
        root,
        step=found.step,
        pieces=stream(found, found.index),
        progress=progress,
        state=found.state,
        attach=attached(found),
        file_bytes=file_bytes,
    )
    return found.directory, made
