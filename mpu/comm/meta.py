# SPDX-License-Identifier: Apache-2.0
"""Run any layout in one process, without numbers: collectives of meta tensors."""

from typing import Any

from torch import Tensor

from mpu.comm.transport import Axis, Handle, Label, Splits, Transport


class MetaTransport(Transport):
    """Carries shapes alone: a model of meta tensors runs any layout in one process.

    A trace receives each collective as in a real run. Every result is a meta tensor.
    """

    def all_reduce(
        self, x: Tensor, axis: Axis, async_op: bool, op: Any, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Return x."""
        assert x.is_meta
        return x, axis.start("all_reduce", x, _nothing, (), None, async_op=async_op, label=label)

    def all_gather(
        self, x: Tensor, axis: Axis, async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Return a tensor with axis.size times the rows of x."""
        assert x.is_meta
        out = x.new_empty((axis.size * x.shape[0], *x.shape[1:])) if into is None else into
        return out, axis.start("all_gather", x, _nothing, (), None, async_op=async_op, label=label)

    def reduce_scatter(
        self, x: Tensor, axis: Axis, async_op: bool, into: Tensor | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Return a tensor with 1 / axis.size of the rows of x."""
        assert x.is_meta and x.shape[0] % axis.size == 0
        out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:])) if into is None else into
        handle = axis.start("reduce_scatter", x, _nothing, (), None, async_op=async_op, label=label)
        return out, handle

    def all_to_all(
        self, x: Tensor, axis: Axis, async_op: bool, splits: Splits | None, label: Label | None
    ) -> tuple[Tensor, Handle]:
        """Return a tensor with the rows that the other ranks would send."""
        assert x.is_meta
        out = x.new_empty((len(x) if splits is None else sum(splits.output), *x.shape[1:]))
        handle = axis.start(
            "all_to_all", x, _nothing, (), async_op=async_op, label=label, splits=splits
        )
        return out, handle


def _nothing() -> None:
    """Start nothing: shapes do not travel."""
