# SPDX-License-Identifier: Apache-2.0
"""Whatever is damaged or full, the last whole checkpoint is found, and the others are named."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mpu.grid import Grid
from training.checkpoint import (
    CheckpointError,
    SaveError,
    check_writable,
    find_latest,
    manifest,
    save,
)
from training.checkpoint.pieces import NamedPiece, whole


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


SHARD = "rank_00000-000.safetensors"


def test_nothing_whole_is_refused_not_restarted(tmp_path: Path, write: Any, newest: Any) -> None:
    flip(write(tmp_path, 1) / SHARD, -3)
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints can be loaded.*XXH3-128"):
        newest(tmp_path)


def test_no_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    write(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SaveError, match="0.0 MB are free"):
        write(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001"]


@pytest.mark.parametrize("what", ["passed_over", "index.json"])
def test_what_no_load_would_accept_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, newest: Any, what: str
) -> None:
    write(tmp_path, 1)
    more = {what: list(range(1, 10_002))} if what == "passed_over" else {}
    with monkeypatch.context() as patch:
        if what == "index.json":
            patch.setattr(manifest, "LIMIT", 160)
        with pytest.raises(SaveError, match=f"step 2 was not saved: .*{what}"):
            write(tmp_path, 2, more)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001"]
    assert newest(tmp_path) == (1, [])


def test_a_place_that_cannot_be_written(tmp_path: Path, write: Any) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "run"
    with pytest.raises(SaveError, match=f"not saved: {below}: rank 0: Not a directory"):
        write(below, 1)
    with pytest.raises(SaveError, match=f"--save {below}: rank 0: Not a directory"):
        check_writable(below, Grid())
    assert os.listdir(tmp_path) == ["file"]


def fail_on(comm: Any, root: str, bad: int, at: str) -> str:
    """Save on all ranks while the disk of one fills; return what this rank was told."""

    def hook(phase: str) -> None:
        if comm.rank == bad and phase == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "its file")

    grid = comm.grid()
    pieces = [
        NamedPiece(n, (4,), (0,), (4,), torch.ones(4), (grid.dp_cp,)) for n in ("a", "b", "c", "d")
    ]
    save(root, step=1, pieces=pieces, state={}, grid=grid)
    try:
        save(root, step=2, pieces=pieces, state={}, grid=grid, hook=hook)
    except SaveError as error:
        notes: list[str] = []
        found = find_latest(root, grid, pieces=pieces, note=notes.append)
        assert found is not None and found.step == 1 and not notes
        return str(error)
    return ""


@pytest.mark.parametrize(("bad", "at"), [(0, "piece"), (1, "piece"), (0, "manifest")])
def test_one_rank_fails_and_all_know(world: Any, tmp_path: Path, bad: int, at: str) -> None:
    messages = world(2).run(fail_on, str(tmp_path), bad, at)
    assert messages[0] == messages[1]
    assert f"rank {bad}: No space left on device: its file" in messages[0]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001"]


def find_with_damage(comm: Any, root: str) -> tuple[int, list[str]]:
    grid, notes = comm.grid(), []
    mine = [whole(f"t{comm.rank}", torch.zeros(4))]  # each rank needs its own file only
    for step in (1, 2):
        save(root, step=step, pieces=mine, state={}, grid=grid)
    if comm.rank == 0:
        flip(Path(root) / "step_00000002" / "rank_00001-000.safetensors", -3)
    from mpu.comm.collectives import barrier

    barrier(grid.world)
    found = find_latest(root, grid, pieces=mine, note=notes.append)
    assert found is not None
    return found.step, notes


def test_ranks_agree_on_the_directory(world: Any, tmp_path: Path) -> None:
    (step0, notes0), (step1, notes1) = world(2).run(find_with_damage, str(tmp_path))
    assert step0 == step1 == 1
    assert len(notes0) == 1 and "rank 1: rank_00001-000.safetensors" in notes0[0]
    assert notes1 == []
