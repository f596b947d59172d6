# SPDX-License-Identifier: Apache-2.0
"""Gradients in `param.grad`, for a program that takes mpu's layers and an optimizer of torch's.

    ctx = LayerContext(grid, sequence_parallel=True, sink=(sink := ParamGrad()))
    loss.backward()                      layers add their weights' gradients to `.grad`
    sink.finish_grad_sync(model, grid)   then sum those of norms over tp, and all over dp x cp
    optimizer.step(); optimizer.zero_grad()

A training run has ParamAndGradBuffer (mpu/zero) in its place: flat buckets, ZeRO, sums under
backward. docs/library.md has the whole program.
"""

import torch
from torch import Tensor, nn

from mpu.comm.collectives import all_reduce_in_order
from mpu.gradients import GradientSink
from mpu.grid import Grid
from mpu.param import placement_of


class ParamGrad(GradientSink):
    """A sink whose main gradients are `param.grad`, in the parameters' own dtype.

    A gradient is fresh where `.grad` is None, so that `optimizer.zero_grad()` starts a step.
    """

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return param.grad, allocated at first use."""
        if param.grad is None:
            param.grad = torch.zeros_like(param, requires_grad=False)
        return param.grad

    def grad_slot(self, param: nn.Parameter) -> tuple[Tensor, bool]:
        """Return (param.grad, fresh), as GradientSink does."""
        fresh = param.grad is None
        return self.main_grad(param), fresh

    def finish_grad_sync(self, module: nn.Module, grid: Grid) -> None:
        """Sum every parameter's gradient over the ranks that have a part of it. Collective.

        These are the axes of its Placement (norms under sequence parallelism: tp) and the ranks of
        Grid.data (dp x cp). A sum, not a mean: divide the loss by all ranks' tokens. Call it once
        a step, after the last backward.
        """
        for param in module.parameters():
            place, grad = placement_of(param), self.main_grad(param)
            for axis in (*place.reduce_axes, grid.data(place.axis.name).every):
                all_reduce_in_order(grad, axis)
