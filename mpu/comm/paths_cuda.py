# SPDX-License-Identifier: Apache-2.0
"""The symmetric path on GPUs: kernels that push rows, wait for rows and multiply in one launch.

    gather       the own rows are pushed and multiplied first; tiles of others' rows wait for theirs
    scatter      tiles of others' rows first, stored where their owner reads them; the owner adds
                 them, in rank order, when the handle is waited for
    gather again nothing is multiplied by these rows now, so a plain all-gather runs beside dgrad

The kernels are mpu/kernels, the memory is mpu/comm/symmetric_cuda.py. float64 takes `none`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpu.comm.handle import Handle, Label
from mpu.comm.paths import Gathering, Path, Separate
from mpu.comm.symmetric_cuda import CHUNKS
from mpu.grid import Axis
from mpu.kernels.all_gather_matmul import all_gather_matmul
from mpu.kernels.matmul_reduce_scatter import add_parts, matmul_scatter

TILE = 128  # rows: a chunk of whole tiles lets none wait for two


def chunk_rows(rows: int) -> int:
    """Return how many of a rank's rows one flag speaks of: as few as there are flags for."""
    return -(-rows // (CHUNKS * TILE)) * TILE


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class _Pushed(Gathering):
    def __init__(self, x: Tensor, axis: Axis) -> None:
        super().__init__(x, axis)
        self._turn: Any = None

    def multiply(self, weights: Sequence[Tensor]) -> list[Tensor]:
        x = _rows(self.x)
        self._turn = self.axis.kernels.begin(x.nbytes)
        exchange = self._turn.exchange(chunk_rows(len(x)))
        out = [all_gather_matmul(x, w, exchange, push=i == 0) for i, w in enumerate(weights)]
        return [y.view(-1, *self.x.shape[1:-1], y.shape[-1]) for y in out]

    def whole(self) -> Tensor:
        """Return what the multiplication has waited for."""
        return self._turn.whole(self.x)

    def close(self) -> None:
        self._turn.close()


class Kernels(Path):
    """Rows travel inside the kernels that multiply them."""

    def of(self, op: str, x: Tensor, width: int) -> Path:
        return Separate(self.axis) if x.dtype == torch.float64 else self

    def gather(self, x: Tensor, label: Label | None = None) -> Gathering:
        return _Pushed(x, self.axis)

    def gather_again(self, x: Tensor, label: Label | None = None) -> Gathering:
        return Separate(self.axis).gather(x, label)

    def multiply_scatter(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor], label: Label | None = None
    ) -> tuple[Tensor, Handle]:
        x, w = xs[0], weights[0]
        if len(xs) > 1:
            x, w = torch.cat(list(xs), -1), torch.cat(list(weights), -1)
        out = x.new_empty((len(x) // self.axis.size, *x.shape[1:-1], len(w)))
        turn = self.axis.kernels.begin(out.nbytes)
        rows = _rows(out)
        exchange = turn.exchange(chunk_rows(len(rows)))
        matmul_scatter(_rows(x), w, exchange)

        def finish() -> None:
            add_parts(rows, exchange)
            turn.close()

        return out, Handle(finish=finish)
