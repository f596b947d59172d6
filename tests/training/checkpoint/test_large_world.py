# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a thousand ranks: tensors in thousands of rectangles are checked and read fast.

The rectangles are a sharded optimizer's over data-parallel 128 x tensor-parallel 8, made for each
rank in turn by a run's own code. Comparing every pair would take minutes; this takes seconds.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mpu.comm.transport import Axis
from mpu.grid import Grid
from mpu.param import Placement
from training.checkpoint import NamedPiece, find_latest, load, save, state_pieces

SHAPES = {  # name: shape, the dimension cut, sections
    "column": ((4000, 16), 0, ()),
    "row": ((64, 1000), 1, ()),
    "gate_up": ((6000, 10), 0, (3000, 3000)),
    "norm": ((40_000,), None, ()),
}


def pieces_of(tp: int, dp: int, fill: bool) -> Iterator[NamedPiece]:
    """Yield every rank's rectangles of all tensors; fill: with numbers that tell their places."""
    for name, (shape, dim, sections) in SHAPES.items():
        full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        names = [f"{name}.{i}" for i in range(len(sections))] or [name]
        ways = 1 if dim is None else tp  # of copies one is written
        for t in range(ways):
            size = 0 if dim is None else shape[dim] // tp
            place = Placement(shape, dim, Axis("tp", t, ways), sections, local_size=size)
            local = full if dim is None else cut(full, dim, sections or shape[dim : dim + 1], tp, t)
            param = nn.Parameter(local.clone() if fill else torch.full_like(local, torch.nan))
            param.placement = place
            flat, part = param.data.flatten(), -(-param.numel() // dp)
            state = [(name, "exp_avg", r * part, flat[r * part :][:part]) for r in range(dp)]
            state = [each for each in state if len(each[3])]
            yield from state_pieces(
                state, [(name, param)], {name: names}, lambda param: Axis("dp_cp_replicate")
            )


def cut(full: Tensor, dim: int, sections: tuple[int, ...], tp: int, t: int) -> Tensor:
    return torch.cat([part.chunk(tp, dim)[t] for part in full.split(sections, dim)], dim)


def test_another_world_reads_what_a_large_one_saved(tmp_path):
    pieces = list(pieces_of(8, 48, fill=True))
    assert len(pieces) > 2500
    save(tmp_path, step=1, pieces=pieces, state={}, grid=Grid())
    blank, wanted = list(pieces_of(4, 24, fill=False)), list(pieces_of(4, 24, fill=True))
    found = find_latest(tmp_path, Grid(), pieces=blank)
    load(found, blank, Grid())
    assert all(torch.equal(b.tensor, w.tensor) for b, w in zip(blank, wanted, strict=True))
