# SPDX-License-Identifier: Apache-2.0
"""Show the conjugate pairs on one screen: what forward does, and what backward must do for it.

                         forward     backward        used where
    copy_to_parallel     identity    all-reduce      x enters a column-parallel region, no SP
    reduce_from_parallel all-reduce  identity        y leaves a row-parallel region, no SP
    gather_from_sequence all-gather  reduce-scatter  x enters a parallel region under SP
    scatter_to_sequence  reduce-sc.  all-gather      y leaves a parallel region under SP
    (Shoeybi et al. 2019, the f and g operators; Korthikanti et al. 2022, the g and g-bar
    operators.)

The linear layers fuse these with their matmuls (mpu/comm/overlap.py); everything else calls them
here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpu.comm.collectives import all_gather, all_reduce, reduce_scatter
from mpu.comm.transport import Axis


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _reduce(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(x.clone(), axis)[0]


def _gather(x: Tensor, axis: Axis) -> Tensor:
    return all_gather(x, axis)[0]


def _scatter(x: Tensor, axis: Axis) -> Tensor:
    return reduce_scatter(x, axis)[0]


class _Pair(torch.autograd.Function):
    """Do one verb forward and its conjugate backward."""

    @staticmethod
    def forward(
        f: Any, x: Tensor, axis: Axis, there: Callable[..., Tensor], back: Callable[..., Tensor]
    ) -> Tensor:
        f.axis, f.back = axis, back
        return there(x, axis)

    @staticmethod
    def backward(f: Any, dy: Tensor) -> Any:
        return f.back(dy, f.axis), None, None, None


def _pair(
    x: Tensor, axis: Axis, there: Callable[..., Tensor], back: Callable[..., Tensor]
) -> Tensor:
    return x if axis.size == 1 else _Pair.apply(x, axis, there, back)


def copy_to_parallel(x: Tensor, axis: Axis) -> Tensor:
    """Pass x on; sum its gradient over the axis."""
    return _pair(x, axis, _identity, _reduce)


def reduce_from_parallel(x: Tensor, axis: Axis) -> Tensor:
    """Sum x over the axis; pass its gradient on."""
    return _pair(x, axis, _reduce, _identity)


def gather_from_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[s/t, b, h] -> [s, b, h]; the gradient is summed and scattered back."""
    return _pair(x, axis, _gather, _scatter)


def scatter_to_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[s, b, h] partial -> [s/t, b, h] summed; the gradient is gathered."""
    return _pair(x, axis, _scatter, _gather)
