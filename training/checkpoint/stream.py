# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint's tensors whole, one at a time, to write them in another format."""

from collections.abc import Container, Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from training.checkpoint.files import read_checked
from training.checkpoint.header import BY_NAME
from training.checkpoint.load import Checkpoint
from training.checkpoint.manifest import INDEX, STATE
from training.checkpoint.pieces import NamedPiece, whole

BIAS = ".e_score_correction_bias"


class Room:
    """Memory that one tensor after another reuses. With a malloc for each of thousands of tensors
    of some MB, heap fragmentation would add up to the size of the whole model."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in the memory of the previous one."""
        size = prod(shape) * dtype.itemsize
        if size > len(self._bytes):
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(shape)


def stream(
    checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype | None = None
) -> list[NamedPiece]:
    """Return whole tensors as pieces that are read when they are written, in `dtype` or as stored.

    A tensor that was read is valid until the next one is read. The bias of the choice of experts is
    not a weight: a step changes it by less than bf16 resolves, so it is never narrower than fp32.
    """
    read, converted = Room(), Room()

    def piece(name: str) -> NamedPiece:
        entry = checkpoint.index[name]
        shape, stored = tuple(entry["shape"]), BY_NAME[entry["dtype"]]

        made = dtype or stored
        if dtype is not None and name.endswith(BIAS):
            made = torch.promote_types(dtype, torch.float32)

        def fetch() -> Tensor:
            target = whole(name, read.tensor(shape, stored))
            checkpoint.read([target])
            if made == stored:
                return target.tensor
            return converted.tensor(shape, made).copy_(target.tensor)

        return whole(name, torch.empty(shape, dtype=made, device="meta"), fetch)

    return [piece(name) for name in names]


def attached(checkpoint: Checkpoint, names: Container[str] | None = None) -> dict[str, bytes]:
    """Return {name: bytes} of a checkpoint's small files besides its tensors: all or `names`."""
    files = checkpoint.manifest["files"]
    return {
        name: read_checked(checkpoint.directory / name, files[name])
        for name in files
        if name not in (INDEX, STATE) and not name.endswith(".safetensors")
        if names is None or name in names
    }
