# SPDX-License-Identifier: Apache-2.0
"""Gather what a matmul needs, and scatter what it makes: the methods of --tp-comm-overlap.

    all_gather             x [n, ...] of every rank -> Gathering; multiply(w) gives gather(x) w^T
    matmul_reduce_scatter  x [t n, ..., k], w [o, k] -> this rank's rows [n, ..., o] of the sum

The two are each other's gradient; mpu/layers/linear.py puts them together. The parts travel by an
OverlapMethod, one of these:

    replicated   no part travels, x is whole on every rank (no sequence parallelism); sums are
                 all-reduced
    none         the collective, then the matmul: the reference
    ring         one part per rank, by messages: the next part arrives while this one is multiplied
                 (mpu/overlap/ring.py)
    symmetric    parts lie in memory that all ranks see and are multiplied where they lie
                 (mpu/overlap/shared.py; on GPUs mpu/overlap/cuda.py)
    auto         for each shape the method that was chosen (mpu/overlap/choices.py)

`ring` and `symmetric` add the ranks' parts in rank order, 16-bit ones in fp32; so does `none` on a
CPU. The multiplication (`product`) is an argument: the layer's recipe gives it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from mpu.comm.collectives import all_gather, all_reduce, reduce_scatter
from mpu.comm.transport import DONE, Axis, Handle, Label

Product = Callable[[Tensor, Tensor], Tensor]  # x [..., k], w [o, k] -> x w^T [..., o]


class Gathering(ABC):
    """x of all ranks, on its way to this one. Call `close` when it is no longer read."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.x, self.axis = x, axis

    @abstractmethod
    def whole(self) -> Tensor:
        """Wait for x of all ranks and return it, [t n, ...]."""

    def multiply(self, weight: Tensor, product: Product) -> Tensor:
        """Return gather(x) w^T: w [o, k] -> [t n, ..., o]."""
        return product(self.whole(), weight)

    def close(self) -> None:  # noqa: B027 - where nothing is held, there is nothing to do
        """Release the memory in which x arrived."""


class OverlapMethod(ABC):
    """How the parts of a matmul's input, or of its output, travel over an axis."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def of(self, op: str, x: Tensor, width: int) -> "OverlapMethod":
        """Return the method for one matmul: this one, unless a subclass chooses by shape or dtype.

        op: `gather` or `scatter`. x: the input. width: columns of the result.
        """
        return self

    @abstractmethod
    def all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        """Start the all-gather of x, to be multiplied."""

    def all_gather_beside(self, x: Tensor, label: Label | None) -> Gathering:
        """Start the all-gather of x for a caller that multiplies something else meanwhile. Only the
        kernels of GPUs, which gather inside a matmul, have another way here.
        """
        return self.all_gather(x, label)

    @abstractmethod
    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, product: Product, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Start the sum over ranks of x w^T; return this rank's rows (Replicated: all rows). They
        are set after the wait.
        """


class _Gathered(Gathering):
    """x of all ranks by one collective, or x that is whole already."""

    def __init__(self, x: Tensor, axis: Axis, full: Tensor, handle: Handle) -> None:
        super().__init__(x, axis)
        self._full, self._handle = full, handle

    def whole(self) -> Tensor:
        self._handle.wait()
        return self._full


class Replicated(OverlapMethod):
    """x is whole on every rank; partial products are all-reduced."""

    def all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        return _Gathered(x, self.axis, x, DONE)

    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, product: Product, label: Label | None
    ) -> tuple[Tensor, Handle]:
        return all_reduce(product(x, weight), self.axis, async_op=True, label=label)


class NoOverlap(OverlapMethod):
    """The collective, then the matmul; the matmul, then the collective."""

    def all_gather(self, x: Tensor, label: Label | None) -> Gathering:
        return _Gathered(x, self.axis, *all_gather(x, self.axis, async_op=True, label=label))

    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, product: Product, label: Label | None
    ) -> tuple[Tensor, Handle]:
        return reduce_scatter(product(x, weight), self.axis, async_op=True, label=label)
