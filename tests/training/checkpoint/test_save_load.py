# SPDX-License-Identifier: Apache-2.0
"""What is saved comes back bit for bit. (Other layouts: test_reshard.py.)"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from mpu.grid import Grid
from training.checkpoint import (
    NamedPiece,
    SaveError,
    check_writable,
    find_latest,
    load,
    save,
)
from training.checkpoint.pieces import whole


def test_what_stands_on_the_disk(tmp_path: Path) -> None:
    values = torch.tensor([1.5, 1e-45, 3.4e38, -0.0])
    state = {"consumed_samples": 9, "config_digest": "ab", "lr": 0.1 + 0.2, "deep": {"a": [1]}}
    path = save(
        tmp_path,
        step=3,
        pieces=[whole("x", values)],
        state=state,
        grid=Grid(),
        attach={"tokenizer.json": b"{}"},
    )
    assert path == tmp_path / "step_00000003"
    files = ["index.json", "manifest.json", "rank_00000-000.safetensors", "state.json"]
    assert sorted(os.listdir(path)) == [*files, "tokenizer.json"]
    assert (tmp_path / "latest").read_text() == "step_00000003\n"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000003"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in path.iterdir())
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["consumed_samples"]) == (3, 9)
    assert (manifest["config_digest"], manifest["layout"]["tp"]) == ("ab", 1)
    found = find_latest(tmp_path, Grid())
    assert found is not None and found.state.items() >= state.items()

    from safetensors.torch import load_file  # a file of whole tensors is anybody's

    read = load_file(path / files[2])["x"]
    assert torch.equal(read.view(torch.uint8), values.view(torch.uint8))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        path = save(
            tmp_path, step=1, pieces=[whole("x", torch.full((3,), value))], state={}, grid=Grid()
        )
    assert sorted(os.listdir(tmp_path)) == ["latest", path.name]
    piece = whole("x", torch.zeros(3))
    found = find_latest(tmp_path, Grid(), pieces=[piece])
    load(found, [piece], Grid())
    assert piece.tensor.tolist() == [2.0] * 3


def test_data_is_fetched_when_it_is_written(tmp_path: Path) -> None:
    alive: list[str] = []

    def lazily(name: str) -> NamedPiece:
        def fetch() -> torch.Tensor:
            alive.append(name)
            return torch.ones(4)

        return whole(name, torch.empty(4, device="meta"), fetch)

    seen = []
    save(
        tmp_path,
        step=0,
        pieces=[lazily("a"), lazily("b")],
        state={},
        grid=Grid(),
        hook=lambda phase: seen.append((phase, list(alive))),
    )
    assert seen[:4] == [("start", []), ("piece", []), ("piece", ["a"]), ("shards", ["a", "b"])]


def test_check_writable_leaves_nothing_in_the_directory(tmp_path: Path) -> None:
    check_writable(tmp_path / "deep" / "run", Grid())
    assert os.listdir(tmp_path / "deep" / "run") == []


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
def test_a_file_system_without_what_a_save_needs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The directory of --save itself is there."""
    real = getattr(os, call)

    def fails(at: Any, *args: Any, **more: Any) -> Any:
        if call == "fsync" and not stat.S_ISDIR(os.fstat(at).st_mode):
            return real(at, *args, **more)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as patch, pytest.raises(SaveError, match="rank 0: Invalid argument"):
        patch.setattr(os, call, fails)
        check_writable(tmp_path, Grid())
    assert os.listdir(tmp_path) == []
