# SPDX-License-Identifier: Apache-2.0
"""Normalise by the root mean square (Zhang and Sennrich 2019)."""

from typing import Any

import torch
from torch import Tensor, nn

from mpu import native
from mpu.context import LayerContext
from mpu.param import Placement, parameter


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w, over the last dimension; computed in the accumulation
    dtype.

    Under sequence parallelism each rank sees a part of s, so the gradient of w is a partial sum
    over tp.
    """

    def __init__(self, hidden_size: int, *, ctx: LayerContext, eps: float = 1e-5) -> None:
        super().__init__()
        self.ctx, self.eps = ctx, eps
        place = Placement((hidden_size,), axis=ctx.tp, reduce_axes=ctx.replicated_over)
        self.weight = parameter(place, ctx.dtype, ctx.device, ctx.sink)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h]."""
        return _RMSNorm.apply(x, self.weight, self)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(f: Any, x: Tensor, weight: nn.Parameter, layer: RMSNorm) -> Tensor:
        f.layer = layer
        kind, h = layer.ctx.accumulate, x.shape[-1]
        whole = layer.ctx.sink.acquire(weight)
        if native.fits(x, whole, accumulate=kind):
            y, inverse = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=kind)
            native.call("norm_forward", x.dtype, x, whole, y, inverse, x.numel() // h, h, layer.eps)
            layer.ctx.sink.end_use(weight)
            f.save_for_backward(x, inverse)
            return y
        up = x.to(kind)
        length = torch.linalg.vector_norm(up, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(layer.eps).rsqrt_()
        f.save_for_backward(x, inverse)
        y = (up * inverse).mul_(whole)
        layer.ctx.sink.end_use(weight)
        return y.to(x.dtype)

    @staticmethod
    def backward(f: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        # with r = 1 / sqrt(mean(x^2) + eps) and p = dy * x, over n rows of h:
        #   dw = sum_n r p;   dx = r (dy * w) - x r^3 (p . w) / h
        layer: RMSNorm = f.layer
        ctx, kind = layer.ctx, layer.ctx.accumulate
        x, inverse = f.saved_tensors
        h, n = x.shape[-1], x.numel() // x.shape[-1]
        dy = dy.contiguous()
        weight = ctx.sink.acquire(layer.weight)
        if native.fits(x, dy, weight, accumulate=kind):
            dx = torch.empty_like(x)
            parts = torch.zeros((torch.get_num_threads(), h), dtype=kind)
            native.call("norm_backward", x.dtype, x, weight, inverse, dy, dx, parts, n, h)
            ctx.sink.end_use(layer.weight)
            ctx.sink.add(layer.weight, parts.sum(0))
            ctx.sink.register_grad_ready(layer.weight)
            return dx, None, None
        weight = weight.to(kind)
        rows, grads, r = x.reshape(-1, h).to(kind), dy.reshape(-1, h).to(kind), inverse.view(-1, 1)
        p = grads * rows
        dw = torch.mv(p.t(), r[:, 0])
        pull = torch.mv(p, weight)[:, None].mul_(r.pow(3)).div_(h)
        dx = torch.mul(grads, weight, out=p).mul_(r).addcmul_(rows, pull, value=-1.0)
        ctx.sink.end_use(layer.weight)
        ctx.sink.add(layer.weight, dw)
        ctx.sink.register_grad_ready(layer.weight)
        return dx.view(x.shape).to(x.dtype), None, None
