# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint that is complete or absent.

    every rank   checks that its values are finite
    every rank   writes its rectangles under step_00000123.tmp-<random>/, fsync
    rank 0       checks that the rectangles tile each tensor; index, state, manifest; fsync
    rank 0       rename to step_00000123/, fsync of the parent: now the checkpoint exists

After each line the ranks exchange outcomes. A failure removes the temporary directory and raises
SaveError on every rank; existing checkpoints are not touched until the rename. `latest` is for
people: nothing reads it.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mpu.comm.transport import Axis
from mpu.grid import Grid
from training.checkpoint.agree import first_error, together
from training.checkpoint.errors import SaveError
from training.checkpoint.files import (
    Hook,
    check_size,
    write_bytes,
    write_json,
    write_safetensors,
)
from training.checkpoint.finite import check_pieces
from training.checkpoint.load import check_state
from training.checkpoint.manifest import (
    FORMAT,
    INDEX,
    MANIFEST,
    PLAIN,
    STATE,
    STEP,
    VERSION,
    VERSION_WITH_FROZEN,
    check_length,
    holds_a_save,
    merge_index,
    parse,
    self_digest,
    step_name,
)
from training.checkpoint.pieces import NamedPiece, dtype_name, into_files, share
from training.checkpoint.retain import clear_rubbish
from training.files.owned import check, fsync_directory, rename
from training.files.untrusted import read_plain

FILE_BYTES = 4 << 30  # limit of a file: several files can be hashed and read at the same time


def save(
    root: str | os.PathLike[str],
    *,
    step: int,
    pieces: Sequence[NamedPiece],
    state: Mapping[str, Any],
    grid: Grid,
    device: torch.device | None = None,
    world: Axis | None = None,
    attach: Mapping[str, bytes] | None = None,
    file_bytes: int = FILE_BYTES,
    hook: Hook = lambda phase: None,
) -> Path:
    """Save collectively; return the new directory.

    pieces: all pieces of this rank (parameter_pieces + state_pieces); a piece that several ranks
        hold is written by one of them.
    state: JSON, the same on every rank; rank 0's is written, with step, layout, torch version.
    device: that of the tensors of the world's collectives (nccl: the rank's GPU).
    world: the axis of all ranks over which they exchange outcomes; None: grid.world.
    attach: {name: bytes} of small files to store too; rank 0's are written.
    hook(phase): "start", "piece" before each tensor, "shards", "manifest", "aside" (an older
        directory of this step was set aside), "renamed"; tests stop a save there.
    Raises SaveError, on every rank, naming the rank, the path and the cause. For a value that is
    not finite, and for a state that could not be read back, nothing is written.
    """
    directory, first = Path(root), grid.rank == 0
    aside: Path | None = None

    def phase(work: Any, rest: str = "; every rank must be able to write there") -> list[Any]:
        outcomes = together(work, world or grid.world, device)
        failed = first_error(outcomes)
        if failed is None:
            return [o.value for o in outcomes]
        if first and aside is not None:
            shutil.rmtree(aside, ignore_errors=True)  # this call made it
        raise SaveError(
            f"the checkpoint of step {step} was not saved: {directory}: rank {failed.rank}: "
            f"{failed.error}{rest} (earlier checkpoints are untouched)"
        )

    mine = into_files(share(pieces), file_bytes)

    def measure() -> int:
        if first:
            check(directory / step_name(step), holds_a_save)
            # else no reader would accept it
            check_state(parse(json.dumps(dict(state)).encode(), STATE))
        check_pieces(piece for file in mine for piece in file)
        return sum(piece.nbytes for file in mine for piece in file)

    need = sum(phase(measure, rest=""))
    hook("start")
    name = phase(lambda: _begin(directory, step, need) if first else None)[0]
    aside = directory / name
    answers = phase(lambda: _write(directory / name, mine, grid.rank, hook))
    hook("shards")
    facts = {
        **state,
        "step": step,
        "layout": layout(grid),
        "torch_version": torch.__version__,
    }

    def commit() -> None:
        if first:
            _commit(directory, name, facts, answers, attach=attach or {}, hook=hook)

    phase(commit)
    return directory / step_name(step)


def layout(grid: Grid) -> dict[str, int]:
    """Return the sizes of the grid, for information: no load needs them."""
    return {
        "world_size": grid.world_size,
        "tp": grid.tp_size,
        "cp": grid.cp_size,
        "dp": grid.dp_size,
        "pp": grid.pp_size,
    }


def _begin(root: Path, step: int, need: int) -> str:
    """Remove the leftovers of killed saves, make a temporary directory and return its name."""
    _make_root(root)
    clear_rubbish(root, set(), lambda line: None)
    check_room(root, need)
    name = f"{step_name(step)}.tmp-{secrets.token_hex(8)}"
    os.mkdir(root / name, 0o700)
    return name


def _make_root(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)


def check_room(root: Path, need: int) -> None:
    """Raise OSError unless `need` bytes are free on the file system of `root`."""
    free = shutil.disk_usage(root).free
    if free < need:
        raise OSError(
            errno.ENOSPC, f"a checkpoint needs {_size(need)} and {_size(free)} are free", str(root)
        )


def _size(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"


def _write(directory: Path, files: list[list[NamedPiece]], rank: int, hook: Hook) -> dict[str, Any]:
    """Write this rank's files; return {"files": {name: info}, "rows": rows of the index}."""
    infos, rows = {}, []
    for i, pieces in enumerate(files):
        name = f"rank_{rank:05d}-{i:03d}.safetensors"
        infos[name] = write_safetensors(directory / name, pieces, hook)
        rows += [
            [p.name, dtype_name(p.tensor.dtype), list(p.shape), name, p.key]
            + [list(p.starts), list(p.sizes)]
            for p in pieces
        ]
    return {"files": infos, "rows": rows}


def _commit(
    root: Path,
    name: str,
    state: dict[str, Any],
    answers: list[dict[str, Any]],
    *,
    attach: Mapping[str, bytes],
    hook: Hook,
) -> None:
    """Write index, state and manifest, then rename the directory to its final name.

    answers: the results of _write() on all ranks.
    """
    aside = root / name
    files = {file: info for answer in answers for file, info in answer["files"].items()}
    for file, info in files.items():
        check_size(aside / file, info["size"])
    index = merge_index([answer["rows"] for answer in answers])
    files[INDEX] = write_bytes(aside / INDEX, json.dumps(index, separators=(",", ":")).encode())
    files[STATE] = write_json(aside / STATE, state)
    for file in (INDEX, STATE):
        check_length(file, files[file]["size"])
    for file, data in attach.items():  # after the state, which names the tokenizer's file
        assert PLAIN.fullmatch(file) and file not in files, file
        files[file] = write_bytes(aside / file, data)
    manifest = {
        "format": FORMAT,
        "version": VERSION_WITH_FROZEN if state.get("frozen_parameters") else VERSION,
        "step": state["step"],
        "consumed_samples": state.get("consumed_samples", 0),
        "consumed_tokens": state.get("consumed_tokens", 0),
        "config_digest": state.get("config_digest", ""),
        "layout": state["layout"],
        "torch_version": state["torch_version"],
        "files": files,
    }
    write_json(aside / MANIFEST, {**manifest, "digest": self_digest(manifest)})
    fsync_directory(aside)
    hook("manifest")
    final = root / step_name(state["step"])
    # a resumed run may reach this step again; find.py reads `old` if we die while it has that name
    old = root / f"{final.name}.old-{secrets.token_hex(8)}"
    rename(aside, final, old, holds_a_save, hook)
    _hint(root, final.name)


def _hint(root: Path, name: str) -> None:
    """Write the newest directory's name to `latest`, for people. A failure harms nothing."""
    with suppress(OSError):
        check(root / "latest", _is_hint)
        aside = root / f".latest-{secrets.token_hex(8)}"
        write_bytes(aside, f"{name}\n".encode())
        os.replace(aside, root / "latest")


def _is_hint(path: Path) -> bool:
    """Return whether a path is a file of _hint, or a link or a pipe, which hold nothing."""
    if path.is_symlink() or not path.is_file():
        return not path.is_dir()
    with suppress(OSError, ValueError):
        return bool(STEP.fullmatch(read_plain(path, 99).decode().strip()))
    return False


def check_writable(
    root: str | os.PathLike[str], grid: Grid, device: torch.device | None = None
) -> list[Path]:
    """Check, before the first step, that `root` can be written.

    Rank 0 makes the directory; one rank a node does in it what a save does: it makes a directory
    with a file, syncs, renames and removes it. Collective. Return the directories that this rank
    made. Raises SaveError, and then nothing is left.
    """
    directory = Path(root)
    made: list[Path] = []

    def check(work: Any) -> None:
        failed = first_error(together(work, grid.world, device))
        if failed is not None:
            for path in made:
                with suppress(OSError):
                    path.rmdir()
            raise SaveError(
                f"--save {directory}: rank {failed.rank}: {failed.error}; the directory must be "
                "writable from every node"
            )

    def probe() -> None:
        path, renamed = (directory / f".probe-{secrets.token_hex(8)}" for _ in range(2))
        try:
            path.mkdir(mode=0o700)
            write_bytes(path / STATE, b"weft")
            fsync_directory(path)
            os.rename(path, renamed)
            fsync_directory(directory)
        finally:
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(renamed, ignore_errors=True)

    def make() -> None:
        made.extend(p for p in (directory, *directory.parents) if not p.exists())
        _make_root(directory)

    check(lambda: make() if grid.rank == 0 else None)
    check(lambda: probe() if grid.launch.local_rank == 0 else None)
    return made
