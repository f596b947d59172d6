# SPDX-License-Identifier: Apache-2.0
"""What the ranks write must tile every tensor exactly once, in every layout."""

import os
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.llama import Llama, LlamaConfig, hf_names
from mpu.comm.transport import Axis
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.param import Placement, parameter, unique_parameters
from training.checkpoint import NamedPiece, header, parameter_pieces, pieces, state_pieces
from training.checkpoint.errors import CheckpointError
from training.checkpoint.files import write_safetensors
from training.checkpoint.manifest import intersection, merge_index, volume
from training.checkpoint.pieces import into_files, rectangles, whole

CONFIG = LlamaConfig(250, 64, 96, 2, 8, 4, make_vocab_size_divisible_by=16, tied=False)


def pieces_of(
    world: int, tp: int, cp: int, rank: int, sharded: bool = False
) -> tuple[list[NamedPiece], Llama]:
    """Return all pieces of one rank, weights and one moment, without allocating them.

    sharded: a data-parallel rank has its part of each flattened moment, cut within rows.
    """
    grid = Grid(world, tp, cp, launch=Launch(rank, world))
    model = Llama(CONFIG, LayerContext(grid, device=torch.device("meta")))
    params, names = list(unique_parameters(model)), hf_names(model)
    pieces = parameter_pieces(params, names, grid)
    moments, r, n = [], grid.dp_cp.rank, grid.dp_cp.size
    for name, p in params:
        low, high = (p.numel() * r // n, p.numel() * (r + 1) // n) if sharded else (0, p.numel())
        moments.append((name, "exp_avg", low, torch.empty(high - low, device="meta")))
    holders = Axis("dp_cp_replicate") if sharded else grid.dp_cp
    return pieces + state_pieces(moments, params, names, lambda param: holders), model


def test_padding_is_no_part_of_a_piece() -> None:
    last = [p for p in pieces_of(4, 4, 1, 3)[0] if p.name == "lm_head.weight"]
    # 250 rows over 4 ranks of 64: the last holds 192..250
    assert [(p.starts, p.sizes) for p in last] == [((192, 0), (58, 64))]
    tiny = LlamaConfig(20, 64, 96, 1, 8, 8, make_vocab_size_divisible_by=16)
    grid = Grid(8, 8, launch=Launch(7, 8))
    model = Llama(tiny, LayerContext(grid, device=torch.device("meta")))
    names = [p.name for p in parameter_pieces(unique_parameters(model), hf_names(model), grid)]
    assert "lm_head.weight" not in names and "model.norm.weight" in names


@pytest.mark.parametrize("shape", [(7,), (3, 5), (3, 2, 4), (2, 3, 1, 5)])
def test_a_range_of_any_tensor_is_cut_into_rectangles(shape: tuple[int, ...]) -> None:
    values = torch.arange(torch.Size(shape).numel())
    for low, high in combinations(range(len(values) + 1), 2):
        seen = torch.full(shape, -1)
        for corner, part in rectangles(shape, low, values[low:high]):
            assert part.data_ptr() >= values[low:].data_ptr(), "a load writes through views"
            at = tuple(slice(a, a + n) for a, n in zip(corner, part.shape, strict=True))
            assert (seen[at] == -1).all()
            seen[at] = part
        want = torch.where((values >= low) & (values < high), values, -1)
        assert torch.equal(seen.flatten(), want), (low, high)


def test_experts_in_one_tensor_are_cut_by_experts() -> None:
    """Of three dimensions, as gpt-oss and Llama 4 save them; moments are cut within a matrix."""
    found, alone = {}, Axis("dp_cp_replicate")
    for rank in range(4):
        grid = Grid(4, ep_size=2, launch=Launch(rank, 4))
        place = Placement((6, 2, 5), 0, grid.ep, local_size=3)
        param = parameter(place, torch.float32, torch.device("meta"))
        some = [("w", param)]
        for piece in parameter_pieces(some, {"w": ("w",)}, grid):
            assert piece.starts == (3 * grid.ep.rank, 0, 0) and piece.sizes == (3, 2, 5)
        n, r = grid.edp.size, grid.edp.rank
        low, high = (30 * each // n for each in (r, r + 1))
        moment = ("w", "exp_avg", low, torch.empty(high - low, device="meta"))
        for piece in state_pieces([moment], some, {"w": ("w",)}, lambda param: alone):
            found[piece.starts] = piece.sizes
    rows = [[["w", "F32", [6, 2, 5], "f", str(a), [*a], [*n]]] for a, n in found.items()]
    merge_index(rows)  # refuses gaps and overlaps
    assert (1, 1, 0) in found


def test_merge_refuses_gaps_overlaps_and_disagreement() -> None:
    def row(name: str, start: int, size: int, shape: int = 4) -> list:
        return [name, "F32", [shape], "f", "k", [start], [size]]

    merge_index([[row("x", 0, 2)], [row("x", 2, 2)]])
    for bad in (
        [row("x", 0, 3)],
        [row("x", 0, 3), row("x", 2, 2)],
        [row("x", 0, 2), row("x", 1, 2)],
    ):
        with pytest.raises(CheckpointError, match="tile x"):
            merge_index([bad])
    with pytest.raises(CheckpointError, match="disagree"):
        merge_index([[row("x", 0, 2)], [row("x", 2, 2, 5)]])


def test_files_stay_below_their_limit() -> None:
    tensors = [whole(f"t{i}", torch.empty(n)) for i, n in enumerate((10, 10, 10, 50, 1, 1))]
    assert [[p.name for p in f] for f in into_files(tensors, 100)] == [
        ["t0", "t1"],
        ["t2"],
        ["t3"],
        ["t4", "t5"],
    ]


@pytest.mark.parametrize(("limit", "most"), [("NAMES", 7), ("HEADER_LIMIT", 1500)])
def test_files_have_no_more_tensors_than_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """An expert of each of many layers is many small tensors."""
    tensors = [whole(f"model.expert{'ä' * (i % 9)}.{i}", torch.ones(1, 2)) for i in range(40)]
    monkeypatch.setattr(pieces, limit, most)
    monkeypatch.setattr(header, limit, most)
    found = dict[str, Any]()
    for i, group in enumerate(into_files(tensors, 1 << 30)):
        path = tmp_path / f"{i}.safetensors"
        write_safetensors(path, group, metadata={"format": "pt"})
        found |= header.read_header(path)[1]
    assert list(found) == [piece.name for piece in tensors]
    assert len(os.listdir(tmp_path)) < 20


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_intersection_is_what_masks_say(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    number = st.integers(0, 5)
    a, b, n, m = (data.draw(st.lists(number, min_size=dims, max_size=dims)) for _ in range(4))
    masks = []
    for starts, sizes in ((a, n), (b, m)):
        mask = torch.zeros([12] * dims, dtype=torch.bool)
        mask[tuple(slice(s, s + z) for s, z in zip(starts, sizes, strict=True))] = True
        masks.append(mask)
    both = masks[0] & masks[1]
    shared = intersection(a, n, b, m)
    if shared is None:
        assert not both.any()
    else:
        starts, sizes = shared
        inside = both[tuple(slice(s, s + z) for s, z in zip(starts, sizes, strict=True))]
        assert inside.all() and int(both.sum()) == volume(sizes)
