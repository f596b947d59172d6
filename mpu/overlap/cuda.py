# SPDX-License-Identifier: Apache-2.0
"""Overlap on GPUs: kernels that push rows, wait for rows and multiply in one launch.

    gather       own rows are pushed and multiplied first; tiles of other ranks' rows wait for them
    scatter      tiles of other ranks' rows are computed first and written to their owner's memory;
                 the owner adds them, in rank order, when the handle is waited for
    overlapped   for rows that are not multiplied now: copy engines copy them during dgrad

The kernels are in mpu/kernels, the memory in mpu/comm/symmetric_cuda.py. float64 uses `none`. The
recipe must multiply plain tensors of one dtype, since the kernels compute the product. Rows of
float8 (uint8, mpu/layers/float8) use `ring`, which multiplies parts by the recipe's product.
"""

import torch
from torch import Tensor

from mpu.comm.symmetric_cuda import CHUNKS, CudaEpoch, CudaSymmetricTransport, CudaWorkspace
from mpu.comm.transport import Axis, Handle, Label
from mpu.kernels.all_gather_matmul import all_gather_matmul
from mpu.kernels.matmul_reduce_scatter import add_parts, matmul_scatter
from mpu.overlap.method import Gathering, NoOverlap, OverlapMethod, Product
from mpu.overlap.ring import Ring

TILE = 128  # rows; as chunks are whole tiles, no tile waits for two chunks


def chunk_rows(rows: int) -> int:
    """Return the rows per flag: the fewest whole TILEs for which CHUNKS flags suffice."""
    return -(-rows // (CHUNKS * TILE)) * TILE


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _workspace(axis: Axis) -> CudaWorkspace:
    transport = axis.required_transport
    assert isinstance(transport, CudaSymmetricTransport)
    return transport.workspace


class _Pushed(Gathering):
    """Gathers x of all ranks inside the kernel that multiplies it."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.x, self.axis = x, axis

    def multiply(self, weight: Tensor, product: Product) -> Tensor:
        x = _rows(self.x)
        self._epoch: CudaEpoch = _workspace(self.axis).begin(x.nbytes)
        exchange = self._epoch.exchange(chunk_rows(len(x)))
        y = all_gather_matmul(x, weight, exchange)
        return y.view(-1, *self.x.shape[1:-1], y.shape[-1])

    def gathered(self) -> Tensor:
        """Return x of all ranks, which has arrived in `multiply`."""
        shape, dtype = tuple(self.x.shape), self.x.dtype
        self._epoch.part(self.axis.rank, shape, dtype).copy_(self.x)
        return self._epoch.gathered(shape, dtype)

    def close(self) -> None:
        self._epoch.close()


class _Copied(Gathering):
    """Gathers x of all ranks by copy engines, on a separate stream.

    The kernels' stream waits for the copies before it launches a kernel that waits for a peer (in
    `gathered` or `close`), so that no such kernel occupies the SM that the flags' kernel needs.
    """

    def __init__(self, x: Tensor, epoch: CudaEpoch) -> None:
        self.x, self._epoch, self._arrived = x, epoch, False

    def gathered(self) -> Tensor:
        if not self._arrived:
            self._epoch.arrive()
            self._arrived = True
        return self._epoch.gathered(tuple(self.x.shape), self.x.dtype)

    def close(self) -> None:
        if not self._arrived:
            self._epoch.arrive()
        self._epoch.close()


class KernelOverlap(OverlapMethod):
    """Rows are exchanged inside the kernels that multiply them."""

    def start_all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        return _Pushed(x, self.axis)

    def start_all_gather_overlapped(self, x: Tensor, label: Label | None) -> Gathering:
        x = x.contiguous()
        epoch = _workspace(self.axis).begin(x.nbytes)
        epoch.send(x)
        return _Copied(x, epoch)

    def of(self, op: str, x: Tensor, width: int) -> OverlapMethod:
        if x.dtype == torch.uint8:
            return Ring(self.axis)
        return NoOverlap(self.axis) if x.dtype == torch.float64 else self

    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, product: Product, label: Label | None
    ) -> tuple[Tensor, Handle]:
        out = x.new_empty((len(x) // self.axis.size, *x.shape[1:-1], len(weight)))
        epoch = _workspace(self.axis).begin(out.nbytes)
        rows = _rows(out)
        exchange = epoch.exchange(chunk_rows(len(rows)))
        matmul_scatter(_rows(x), weight, exchange)

        def finish() -> None:
            add_parts(rows, exchange)
            epoch.close()

        return out, Handle(finish=finish)
