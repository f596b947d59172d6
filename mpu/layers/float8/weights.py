# SPDX-License-Identifier: Apache-2.0
"""How a weight travels in float8 (--fp8-param-gather): its codes cut anywhere, its scales whole.

ZeRO shares a flat bucket equally, so a part of a weight [o, i] begins and ends in the middle of
rows and blocks. A scale's byte is the maximum over all parts (mpu/layers/float8/rows.py), so ranks
agree on the bytes, each then makes the codes of its part, and the codes' bytes are gathered. The
rows are those that Float8.operand makes of the whole weight, byte by byte.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.layers.float8.delayed import Slot
from mpu.layers.float8.rows import BLOCKS, E4M3, encode, finish, row_bytes, row_scales


@dataclass(frozen=True)
class WeightRows:
    """The rows of one local weight, of `shape` [o, i]. shared: ranks of tp divide its scales' rows.

    slot: where its scale follows from earlier steps (delayed.py). on_gpu: LayerContext's.

    A run is what lies side by side in a row and has one scale: a row, or a block of it.
    """

    shape: tuple[int, int]
    scaling: str
    shared: bool
    slot: Slot | None = None
    on_gpu: bool = False

    @property
    def run(self) -> int:
        """Return the numbers in a run."""
        return BLOCKS[self.scaling] or self.shape[1]

    @property
    def count(self) -> int:
        """Return how many bytes of scales the weight has."""
        if self.scaling == "tensorwise":
            return 1
        runs = self.shape[0] * self.shape[1] // self.run
        return runs // self.run if self.scaling == "blockwise" else runs

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows."""
        return self.shape[0] * row_bytes(self.shape[1], BLOCKS[self.scaling])

    def scales(self, part: Tensor, first: int) -> Tensor:
        """Return the scales of elements [first, first + n) of the flat weight: bytes [count].

        They are 0 where the part has nothing, and no byte of a scale is.
        """
        runs, at, _ = self._runs(part, first)
        o, i = self.shape
        byte = torch.zeros(o * i // self.run, dtype=torch.uint8, device=part.device)
        byte[at : at + len(runs)] = row_scales(runs, 0, E4M3, self.on_gpu)[:, 0]
        if self.scaling == "tensorwise":
            scale = byte.amax(0, keepdim=True)
            if self.slot is None:
                return scale
            self.slot.note("w", scale)
            return self.slot.scale("w", scale) if self.slot.filled else scale
        if self.scaling == "blockwise":
            return byte.view(-1, self.run, i // self.run).amax(1).flatten()
        return byte

    def codes(self, part: Tensor, first: int, scales: Tensor) -> Tensor:
        """Return the codes of elements [first, first + n): part [n], scales [count] -> [n]."""
        runs, at, skip = self._runs(part, first)
        byte = self._by_rows(scales).reshape(-1)[at : at + len(runs)]
        rows = encode(runs, byte.unsqueeze(1), E4M3, on_gpu=self.on_gpu)
        return rows[:, : self.run].reshape(-1)[skip : skip + len(part)]

    def rows(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """Fill and return rows: codes [o i], scales [count], out [nbytes] -> [o, row_bytes]."""
        (o, i), byte = self.shape, self._by_rows(scales)
        rows = out.view(o, -1)
        rows[:, :i] = codes.view(o, i)
        return finish(rows, i, byte)

    def _runs(self, part: Tensor, first: int) -> tuple[Tensor, int, int]:
        """Return runs [n, run] with zeros around the part, the first's number, the zeros before."""
        at, skip = divmod(first, self.run)
        padded = F.pad(part, (skip, -(skip + len(part)) % self.run))
        return padded.view(-1, self.run), at, skip

    def _by_rows(self, scales: Tensor) -> Tensor:
        """Return the scales row by row: bytes [o, i / run]."""
        o, i = self.shape
        if self.scaling == "blockwise":
            return scales.view(-1, i // self.run).repeat_interleave(self.run, 0)
        return scales.expand(o).unsqueeze(1) if len(scales) == 1 else scales.view(o, -1)
