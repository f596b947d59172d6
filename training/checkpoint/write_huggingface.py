# SPDX-License-Identifier: Apache-2.0
"""Write the weights of a checkpoint as a Hugging Face directory that is complete or absent.

    rank 0       makes .step_00000123.tmp-<random>/ next to the final directory
    every rank   writes every world-size-th file of weights there, tensor by tensor, fsync
    rank 0       index, config.json, tokenizer; fsync; rename; fsync of the parent

The tensors are read from a complete checkpoint, so the layout that trained does not matter, no
weights are sent between ranks, and a rank holds one tensor at a time. As in save.py the ranks
exchange outcomes after each line.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpu.comm.transport import Axis
from mpu.grid import Grid
from training.checkpoint.agree import first_error, together
from training.checkpoint.errors import SaveError
from training.checkpoint.files import (
    Hook,
    write_bytes,
    write_json,
    write_safetensors,
)
from training.checkpoint.load import Checkpoint
from training.checkpoint.pieces import NamedPiece, into_files
from training.checkpoint.stream import stream
from training.files.owned import check, empty, fsync_directory, rename, set_aside
from training.files.written import Written

RUBBISH = re.compile(r"\.(.+)\.(tmp|old)-[0-9a-f]{16}")  # leftovers of a killed write or removal
Extra = tuple[Mapping[str, bytes], Mapping[str, Any]]  # small files; more fields of config.json


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
    record: Written | None = None,
) -> None:
    """Write the tensors `names` of a checkpoint to `target`, collectively.

    The files have the names of transformers' save_pretrained. dtype: of the weights; None: as they
    are stored. shard_bytes: limit of a file. extra(): on rank 0, returns the small files, and the
    fields of config.json besides the sizes in `found.state`. world, device: as in save(). record:
    on rank 0, that of the directories that may be replaced at `target`; None: an empty directory
    may be. hook(phase): "start", "piece" before each tensor, "written", "commit", "aside",
    "renamed". arrange(pieces): converts the stored tensors to those that are written. Raises
    SaveError, on every rank, with the rank, path and cause.
    """
    first, aside = grid.rank == 0, Path()

    def phase(work: Callable[[], Any]) -> list[Any]:
        outcomes = together(work, world or grid.world, device)
        if (failed := first_error(outcomes)) is None:
            return [outcome.value for outcome in outcomes]
        if first and aside.name:
            shutil.rmtree(aside, ignore_errors=True)  # this call made it
        why = f"rank {failed.rank}: {failed.error}" if grid.world_size > 1 else failed.error
        raise SaveError(f"{target}: no Hugging Face directory was written: {why}")

    def begin() -> str | None:
        if not first:
            return None
        check(target, ours)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = temporary("tmp")
        (target.parent / name).mkdir(mode=0o700)
        return name

    def temporary(kind: str) -> str:
        if record is not None:
            return record.temporary(target.name, kind)
        return f".{target.name}.{kind}-{secrets.token_hex(8)}"

    ours = empty if record is None else record.ours
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

    def write() -> dict[str, str]:
        sums = {}
        for group in files[grid.rank :: grid.world_size]:
            name = weight_map[group[0].name]
            written = write_safetensors(aside / name, group, hook, metadata={"format": "pt"})
            sums[name] = written["xxh3_128"]
        return sums

    sums = {name: value for of_rank in phase(write) for name, value in of_rank.items()}
    hook("written")

    def commit() -> None:
        if not first:
            return
        more, fields = extra()

        def add(name: str, info: dict[str, Any]) -> None:
            sums[name] = info["xxh3_128"]

        if len(files) > 1:
            total = {"total_size": sum(piece.nbytes for piece in pieces)}
            index = {"metadata": total, "weight_map": weight_map}
            name = "model.safetensors.index.json"
            add(name, write_json(aside / name, index))
        dtype_name = str(pieces[0].tensor.dtype).removeprefix("torch.")
        config = {**found.state["hf_config"], "torch_dtype": dtype_name, **fields}
        add("config.json", write_json(aside / "config.json", config))
        for name, data in more.items():
            add(name, write_bytes(aside / name, data))
        fsync_directory(aside)
        hook("commit")
        old = target.with_name(temporary("old"))
        if record is not None:
            record.add(target.name, aside, sums)
        rename(aside, target, old, ours, hook)
        if record is not None:
            gone = [name for name in record.leftovers() if not (target.parent / name).exists()]
            record.settle(*gone, latest=target.name)

    phase(commit)


def clear(root: Path, record: Written) -> None:
    """Remove the leftovers of killed writes and removals of the record's purpose under `root`."""
    for name in record.leftovers():
        if record.ours(root / name):
            shutil.rmtree(root / name, ignore_errors=True)
    record.settle(*(n for n in record.leftovers() if not os.path.lexists(root / n)))
    for entry in os.scandir(root) if root.is_dir() else ():
        match = RUBBISH.fullmatch(entry.name)
        if match and record.was(root / entry.name, match[1]):
            shutil.rmtree(entry.path, ignore_errors=True)


def keep_newest(
    root: Path,
    count: int | None,
    name: re.Pattern[str],
    record: Written,
    stay: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Remove the record's directories whose names match, except the newest `count` and `stay`.

    Return the names of those removed, and of those that were not because they were changed after
    they were written.
    """
    known = [n for n in record.names() if name.fullmatch(n) and os.path.lexists(root / n)]
    removed, changed = list[str](), list[str]()
    for each in sorted(known, key=lambda name: (len(name), name))[: -count if count else 0]:
        if each in stay:
            continue
        if not record.ours(root / each):
            changed.append(each)
            continue
        trash = record.temporary(each, "old")
        set_aside(root / each, root / trash, record.ours)
        shutil.rmtree(root / trash, ignore_errors=True)
        record.settle(each, *([] if (root / trash).exists() else [trash]))
        removed.append(each)
    return removed, changed
