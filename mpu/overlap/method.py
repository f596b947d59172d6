# SPDX-License-Identifier: Apache-2.0
"""Gather a matmul's input, or scatter its output: the methods of --tp-comm-overlap.

    start_all_gather       x [n, ...] of every rank -> Gathering; multiply(w) gives gather(x) w^T
    matmul_reduce_scatter  x [t n, ..., k], w [o, k] -> this rank's rows [n, ..., o] of the sum

The two are each other's gradient; mpu/layers/linear.py combines them. An OverlapMethod exchanges
the parts. The methods are:

    replicated   x is replicated (no sequence parallelism), so nothing is gathered; sums are
                 all-reduced
    none         the collective, then the matmul: the reference
    ring         one part per rank, by messages: the next part arrives while this one is multiplied
                 (mpu/overlap/ring.py)
    symmetric    parts are in memory that all ranks share and are multiplied in place (Symmetric
                 below; on GPUs mpu/overlap/cuda.py)
    auto         for each shape the method that was chosen (mpu/overlap/choices.py)

`ring` and `symmetric` add the ranks' parts in rank order, 16-bit ones in fp32; so does `none` on a
CPU. The multiplication (`product`) is an argument, from the layer's recipe.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from mpu.comm.collectives import all_reduce, reduce_scatter
from mpu.comm.shared_memory import SharedMemoryTransport
from mpu.comm.transport import DONE, Axis, Handle, Label
from mpu.comm.workspace import Epoch

Product = Callable[[Tensor, Tensor], Tensor]  # x [..., k], w [o, k] -> x w^T [..., o]


class Gathering:
    """An all-gather of x in flight, [t n, ...]; call `close` when x is no longer read.

    full: the destination. handle: of the all-gather.
    """

    def __init__(self, full: Tensor, handle: Handle) -> None:
        self._full, self._handle = full, handle

    def gathered(self) -> Tensor:
        """Wait for x of all ranks and return it, [t n, ...]."""
        self._handle.wait()
        return self._full

    def multiply(self, weight: Tensor, product: Product) -> Tensor:
        """Return gather(x) w^T: w [o, k] -> [t n, ..., o]."""
        return product(self.gathered(), weight)

    def close(self) -> None:
        """Release the memory of the gathered x."""


class OverlapMethod(ABC):
    """How the parts of a matmul's input, or of its output, are exchanged over an axis."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def of(self, op: str, x: Tensor, width: int) -> "OverlapMethod":
        """Return the method for one matmul: this one, unless a subclass chooses by shape or dtype.

        op: `gather` or `scatter`. x: the input. width: columns of the result.
        """
        return self

    @abstractmethod
    def start_all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        """Start to gather x, which is then multiplied."""

    def start_all_gather_overlapped(self, x: Tensor, label: Label | None) -> Gathering:
        """Start to gather x while another matmul runs.

        This only differs for the GPU kernels, which otherwise gather inside a matmul.
        """
        return self.start_all_gather(x, label)

    @abstractmethod
    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, product: Product, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Start the sum over ranks of x w^T; return this rank's rows (Replicated: all rows). They
        are valid after the wait.
        """


class Replicated(OverlapMethod):
    """x is replicated; partial products are all-reduced."""

    def start_all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        return Gathering(x, DONE)

    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, product: Product, label: Label | None
    ) -> tuple[Tensor, Handle]:
        return all_reduce(product(x, weight), self.axis, async_op=True, label=label)


class NoOverlap(OverlapMethod):
    """No overlap: the all-gather, then the matmul; the matmul, then the reduce-scatter."""

    def start_all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        return Gathering(*self.axis.required_transport.all_gather(x, self.axis, True, None, label))

    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, product: Product, label: Label | None
    ) -> tuple[Tensor, Handle]:
        return reduce_scatter(product(x, weight), self.axis, async_op=True, label=label)


class _InPlace(Gathering):
    """A gathered x in memory shared by the ranks of one host, to which each writes its part."""

    def __init__(
        self, handle: Handle, epoch: Epoch, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._handle, self._epoch, self._shape, self._dtype = handle, epoch, shape, dtype
        self._copy: Tensor | None = None
        epoch.complete = self._save

    def gathered(self) -> Tensor:
        self._handle.wait()
        return self._epoch.gathered(self._shape, self._dtype) if self._copy is None else self._copy

    def close(self) -> None:
        self._epoch.close()
        self._epoch.complete = (
            self._epoch.close
        )  # avoids a reference cycle of epoch and gathering, which would keep x alive

    def _save(self) -> None:
        """Copy x, as a later epoch is about to overwrite it."""
        self._copy = self.gathered().clone()
        self._epoch.close()


class Symmetric(NoOverlap):
    """The parts are contiguous in shared memory, and one matmul reads them in place.

    On a CPU there is nothing to hide except the wait for a late rank, and a matmul in parts is
    slower than a whole one. Scatter is that of NoOverlap: the transport's sum, in the same order.
    """

    def start_all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        transport, size = self.axis.required_transport, self.axis.size
        assert isinstance(transport, SharedMemoryTransport)
        with self.axis.start("all_gather", x, async_op=True, label=label) as handle:
            epoch = transport.workspace.begin(x.nbytes)
            gathering = _InPlace(handle, epoch, (size * len(x), *x.shape[1:]), x.dtype)
            epoch.put(x)
            handle.work, handle.keep = epoch, (x,)
        return gathering
