# SPDX-License-Identifier: Apache-2.0
"""What is saved comes back bit for bit. (Other layouts: test_reshard.py.)"""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from model.llama import Llama, LlamaConfig, hf_config, hf_names
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.param import draw_normal, unique_parameters
from tests.sampling import sampled
from training.checkpoint import (
    NamedPiece,
    check_writable,
    find_latest,
    load,
    parameter_pieces,
    save,
    state_pieces,
)
from training.checkpoint.pieces import whole

CONFIG = LlamaConfig(250, 64, 96, 2, 8, 4, make_vocab_size_divisible_by=16)


def model_and_state(grid: Grid, seed: int, dtype: torch.dtype) -> list[NamedPiece]:
    """Draw weights, moments and masters that are the same in every layout, and list them."""
    model = Llama(CONFIG, LayerContext(grid, dtype=dtype)).initialize(seed)
    params, names, state = list(unique_parameters(model)), hf_names(model), []
    for i, kind in enumerate(("master", "exp_avg", "exp_avg_sq")):
        for name, p in params:
            t = torch.nn.Parameter(torch.empty(p.shape), requires_grad=False)
            t.placement = p.placement  # type: ignore[attr-defined]
            draw_normal(t, names[name], 1.0, seed + 100 * (i + 1))
            state.append((name, kind, 0, t.data.flatten()))
    with torch.no_grad():
        for name, p in params:
            if p.dim() == 1:
                draw_normal(p, names[name], 1.0, seed)
    pieces = parameter_pieces(params, names, grid)
    return pieces + state_pieces(state, params, names, lambda param: grid.dp_cp)


def save_in(comm: Any, root: str, tp: int, dtype: torch.dtype) -> list[str]:
    grid = comm.grid(tp)
    path = save(
        root,
        step=7,
        pieces=model_and_state(grid, 1, dtype),
        state={"hf_config": hf_config(CONFIG), "consumed_samples": 56, "lr": 0.1},
        grid=grid,
        file_bytes=200_000,  # several files a rank
    )
    return sorted(p.name for p in path.iterdir())


def load_in(comm: Any, root: str, tp: int, dtype: torch.dtype) -> tuple[int, float]:
    """Fill zeros and compare with what was drawn for this layout; any bit counts."""
    grid = comm.grid(tp)
    wanted = model_and_state(grid, 1, dtype)
    blank = [
        NamedPiece(p.name, p.shape, p.starts, p.sizes, torch.full_like(p.tensor, float("nan")))
        for p in wanted
    ]
    checkpoint = find_latest(root, grid, pieces=blank, expect=hf_config(CONFIG))
    load(checkpoint, blank, grid)
    for p, q in zip(wanted, blank, strict=True):
        assert torch.equal(p.tensor.view(torch.uint8), q.tensor.view(torch.uint8)), p.name
    return checkpoint.step, checkpoint.state["lr"]


@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, torch.float32, torch.float64], 3))
@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 2), (2, 1)])
def test_the_same_layout_gives_the_same_bits(
    world: Any, tmp_path: Path, size: int, tp: int, dtype: torch.dtype
) -> None:
    root = str(tmp_path / "new" / "run")
    names = world(size).run(save_in, root, tp, dtype)
    assert all(n == names[0] for n in names)
    assert {n[:10] for n in names[0] if n.startswith("rank")} == {
        f"rank_{r:05d}" for r in range(size)
    }
    assert world(size).run(load_in, root, tp, dtype) == [(7, 0.1)] * size


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
    check_writable(tmp_path / "deep" / "run", Grid(), [whole("x", torch.zeros(4))])
    assert os.listdir(tmp_path / "deep" / "run") == []
