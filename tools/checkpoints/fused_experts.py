# SPDX-License-Identifier: Apache-2.0
"""Write the experts of a layer as transformers 5 holds them: two tensors of three dimensions.

experts.gate_up_proj [E, 2f, h]    gate_proj (w1) and up_proj (w3) of each expert, one after
                                   the other
experts.down_proj [E, h, f]        down_proj (w2) of each expert
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from training.checkpoint import Checkpoint, NamedPiece
from training.checkpoint.header import BY_NAME
from training.checkpoint.pieces import whole
from training.checkpoint.stream import Room

EXPERT = re.compile(
    r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight"
)
PLACE = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def fused_pieces(
    found: Checkpoint, pieces: Sequence[NamedPiece], *, dtype: torch.dtype | None
) -> list[NamedPiece]:
    """Return the pieces of an export, those of experts fused layer by layer, others as they are.

    Raises ValueError where there are no experts.
    """
    unfused, layers = list[NamedPiece](), dict[str, dict[tuple[int, int], str]]()
    for piece in pieces:
        if match := EXPERT.fullmatch(piece.name):
            layer, expert, kind = match.groups()
            layers.setdefault(layer, {})[int(expert), PLACE[kind]] = piece.name
        else:
            unfused.append(piece)
    if not layers:
        raise ValueError(f"--fused-experts: {found.directory} has no experts")
    renamed = [
        whole(
            piece.name.replace(".block_sparse_moe.gate.", ".mlp.gate."), piece.tensor, piece.fetch
        )
        for piece in unfused
    ]
    room = Room()
    for layer, names in layers.items():
        for kind, places in (("gate_up_proj", (0, 1)), ("down_proj", (2,))):
            count = 1 + max(expert for expert, _ in names)
            rows = [[names[expert, place] for place in places] for expert in range(count)]
            target = f"{layer}.mlp.experts.{kind}"
            renamed.append(_one(found, target, rows, dtype, room))
    return renamed


def _one(
    found: Checkpoint, target: str, rows: list[list[str]], dtype: torch.dtype | None, room: Room
) -> NamedPiece:
    """Return one fused tensor, which is read when it is written."""
    first = found.index[rows[0][0]]
    (height, width), stored = first["shape"], BY_NAME[first["dtype"]]
    shape = len(rows), height * len(rows[0]), width

    def fetch() -> Tensor:
        made = room.tensor(shape, stored)
        parts = made.view(len(rows), len(rows[0]), height, width)
        found.read(
            [whole(name, parts[e, i]) for e, own in enumerate(rows) for i, name in enumerate(own)]
        )
        return made if dtype is None else made.to(dtype)

    return whole(target, torch.empty(shape, dtype=dtype or stored, device="meta"), fetch)
