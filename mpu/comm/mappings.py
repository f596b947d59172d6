# SPDX-License-Identifier: Apache-2.0
"""Collectives under autograd, each with the conjugate collective for its backward.

    function                                     forward         backward        where, in a layer
    copy_to_tensor_model_parallel_region         identity        all-reduce      x enters, no SP
    reduce_from_tensor_model_parallel_region     all-reduce      identity        y leaves, no SP
    gather_from_sequence_parallel_region         all-gather      reduce-scatter  x enters under SP
    reduce_scatter_to_sequence_parallel_region   reduce-scatter  all-gather      y leaves under SP
    differentiable_all_to_all                    all-to-all      all-to-all      tokens to experts
    (operators f and g of Shoeybi et al. 2019, g and g-bar of Korthikanti et al. 2022)

The linear layers fuse these with their matmuls (mpu/layers/linear.py). The embedding calls these
functions, and so can the layers of a fork that enter or leave a parallel region. who: the calling
layer, for the trace of the axis.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpu.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from mpu.comm.transport import Axis, Label, Splits
from mpu.interleave import Interleaver

Verb = Callable[[Tensor, Axis, Label], Tensor]


def _identity(x: Tensor, axis: Axis, label: Label) -> Tensor:
    return x.view_as(x)


def _reduce(x: Tensor, axis: Axis, label: Label) -> Tensor:
    return all_reduce(x.clone(), axis, label=label)[0]


def _gather(x: Tensor, axis: Axis, label: Label) -> Tensor:
    return all_gather(x, axis, label=label)[0]


def _scatter(x: Tensor, axis: Axis, label: Label) -> Tensor:
    return reduce_scatter(x, axis, label=label)[0]


def _exchange(
    x: Tensor, axis: Axis, label: Label, splits: Splits | None, interleaver: Interleaver | None
) -> Tensor:
    overlapped = interleaver is not None and interleaver.two
    y, handle = all_to_all(x, axis, async_op=overlapped, splits=splits, label=label)
    if interleaver is not None:
        interleaver.switch()
    handle.wait()
    return y


class _Pair(torch.autograd.Function):
    """One collective in forward and its conjugate in backward."""

    @staticmethod
    def forward(
        saved_ctx: Any, x: Tensor, axis: Axis, there: Verb, back: Verb, who: object
    ) -> Tensor:
        saved_ctx.axis, saved_ctx.back, saved_ctx.who = axis, back, who
        return there(x, axis, Label(who, "forward"))

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> Any:
        return (
            saved_ctx.back(dy, saved_ctx.axis, Label(saved_ctx.who, "backward")),
            None,
            None,
            None,
            None,
        )


def _pair(x: Tensor, axis: Axis, there: Verb, back: Verb, who: object) -> Tensor:
    return x if axis.size == 1 else _Pair.apply(x, axis, there, back, who)


def copy_to_tensor_model_parallel_region(x: Tensor, axis: Axis, who: object = None) -> Tensor:
    """Return x unchanged; sum its gradient over the axis."""
    return _pair(x, axis, _identity, _reduce, who)


def reduce_from_tensor_model_parallel_region(x: Tensor, axis: Axis, who: object = None) -> Tensor:
    """Sum x over the axis; its gradient is unchanged."""
    return _pair(x, axis, _reduce, _identity, who)


def gather_from_sequence_parallel_region(x: Tensor, axis: Axis, who: object = None) -> Tensor:
    """Gather [s/t, b, h] -> [s, b, h]; its gradient is summed and scattered back."""
    return _pair(x, axis, _gather, _scatter, who)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, axis: Axis, who: object = None) -> Tensor:
    """Sum partial [s, b, h] over ranks, keep own rows [s/t, b, h]; its gradient is gathered."""
    return _pair(x, axis, _scatter, _gather, who)


def differentiable_all_to_all(
    x: Tensor,
    axis: Axis,
    splits: Splits | None = None,
    who: object = None,
    interleaver: Interleaver | None = None,
) -> Tensor:
    """Send each rank its rows of dim 0; their gradients return by the reversed splits.

    interleaver: runs two micro-batches, one of which computes while the other's rows are in flight.
    """
    back = None if splits is None else splits.reversed
    there = partial(_exchange, splits=splits, interleaver=interleaver)
    return _pair(x, axis, there, partial(_exchange, splits=back, interleaver=interleaver), who)
