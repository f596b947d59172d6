# SPDX-License-Identifier: Apache-2.0
"""Write the weights of a checkpoint as a Hugging Face directory that is complete or absent.

    rank 0       makes .step_00000123.tmp-<random>/ next to the directory that is to be
    every rank   writes each world-size-th file of weights there, tensor by tensor, fsync
    rank 0       index, config.json, tokenizer; fsync; rename; fsync of the parent

The tensors are read from a checkpoint that is complete, so the layout that trained does not matter,
no weight travels between ranks, and a rank holds one tensor at a time. As in save.py the ranks
exchange after each line how it went.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpu.comm.transport import Axis
from mpu.grid import Grid
from training.checkpoint.agree import first_error, together
from training.checkpoint.errors import SaveError
from training.checkpoint.files import (
    Hook,
    fsync_directory,
    write_bytes,
    write_json,
    write_safetensors,
)
from training.checkpoint.load import Checkpoint
from training.checkpoint.pieces import NamedPiece, into_files, is_state
from training.checkpoint.stream import stream

RUBBISH = re.compile(r"\..+\.(tmp|old)-[0-9a-f]{16}")  # what a killed write or removal left
Extra = tuple[Mapping[str, bytes], Mapping[str, Any]]  # small files; more fields of config.json


def weights_of(found: Checkpoint) -> list[str]:
    """Return the names of a checkpoint's weights: all that is no optimizer state."""
    return [name for name in found.index if not is_state(name, found.index)]


def write_huggingface(
    target: Path,
    found: Checkpoint,
    names: Sequence[str],
    extra: Callable[[], Extra],
    *,
    dtype: torch.dtype | None,
    shard_bytes: int,
    grid: Grid,
    world: Axis | None = None,
    device: torch.device | None = None,
    hook: Hook = lambda phase: None,
    arrange: Callable[[list[NamedPiece]], list[NamedPiece]] = list,
) -> None:
    """Write the tensors `names` of a checkpoint to `target`, collectively.

    The files have the names of transformers' save_pretrained. dtype: of the weights; None: as they
    are stored. shard_bytes: a file's limit. extra(): on rank 0, the small files, and what
    config.json has besides the sizes of `found.state`. world, device: as in save(). What is at
    `target` is replaced. hook(phase): "start", "piece" before each tensor, "written", "commit",
    "aside", "renamed". arrange(pieces): what is written, of the tensors as they are. Raises
    SaveError, on every rank, with the rank, the path and the cause.
    """
    first, aside = grid.rank == 0, Path()

    def phase(work: Callable[[], Any]) -> list[Any]:
        outcomes = together(work, world or grid.world, device)
        if (failed := first_error(outcomes)) is None:
            return [outcome.value for outcome in outcomes]
        if first and aside.name:
            shutil.rmtree(aside, ignore_errors=True)
        why = f"rank {failed.rank}: {failed.error}" if grid.world_size > 1 else failed.error
        raise SaveError(f"{target}: no Hugging Face directory was written: {why}")

    def begin() -> str | None:
        if not first:
            return None
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f".{target.name}.tmp-{secrets.token_hex(8)}"
        (target.parent / name).mkdir(mode=0o700)
        return name

    hook("start")
    aside = target.parent / phase(begin)[0]
    pieces = arrange(stream(found, names, dtype))
    files = into_files(pieces, shard_bytes)
    weight_map: dict[str, str] = {}
    for i, group in enumerate(files, 1):
        many = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys((p.name for p in group), many)
    if len(files) == 1:
        weight_map = dict.fromkeys(weight_map, "model.safetensors")

    def write() -> None:
        for group in files[grid.rank :: grid.world_size]:
            at = aside / weight_map[group[0].name]
            write_safetensors(at, group, hook, metadata={"format": "pt"})

    phase(write)
    hook("written")

    def commit() -> None:
        if not first:
            return
        more, fields = extra()
        if len(files) > 1:
            total = {"total_size": sum(piece.nbytes for piece in pieces)}
            index = {"metadata": total, "weight_map": weight_map}
            write_json(aside / "model.safetensors.index.json", index)
        dtype_name = str(pieces[0].tensor.dtype).removeprefix("torch.")
        config = {**found.state["hf_config"], "torch_dtype": dtype_name, **fields}
        write_json(aside / "config.json", config)
        for name, data in more.items():
            write_bytes(aside / name, data)
        fsync_directory(aside)
        hook("commit")
        _rename(aside, target, hook)

    phase(commit)


def _rename(aside: Path, target: Path, hook: Hook) -> None:
    """Give the directory its name; an older one of that name is removed."""
    old = target.with_name(f".{target.name}.old-{secrets.token_hex(8)}")
    replacing = os.path.lexists(target)
    if replacing:
        os.rename(target, old)
        hook("aside")
    os.rename(aside, target)
    fsync_directory(target.parent)
    hook("renamed")
    if replacing:
        shutil.rmtree(old, ignore_errors=True)


def clear(root: Path) -> None:
    """Remove what killed writes and removals left under `root`. Nobody else may write there."""
    for entry in os.scandir(root) if root.is_dir() else ():
        if RUBBISH.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


def keep_newest(root: Path, count: int | None, name: re.Pattern[str]) -> list[str]:
    """Remove all but the newest `count` directories under `root` whose names fit; return theirs.

    A directory first takes a name that nobody reads.
    """
    found = sorted(e.name for e in os.scandir(root) if name.fullmatch(e.name) and e.is_dir())
    removed = found[:-count] if count else []
    for each in removed:
        trash = root / f".{each}.old-{secrets.token_hex(8)}"
        os.rename(root / each, trash)
        shutil.rmtree(trash, ignore_errors=True)
    return removed
