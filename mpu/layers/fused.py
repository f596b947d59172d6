# SPDX-License-Identifier: Apache-2.0
"""Normalise, rotate, gate: the operations between the matmuls, each in one pass over memory.

    RMSNorm      y = x / sqrt(mean(x^2) + eps) * w    Zhang and Sennrich 2019
    apply_rope   rotate q and k by their position     Su et al. 2021; the angles: mpu/layers/rope.py
    swiglu       silu(gate) * up                      Shazeer 2020

On a CPU each calls a function of csrc/fused.cpp. Where that library is not built, or does not take
the tensors (`fits`), torch's operations compute the same.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu import native
from mpu.context import LayerContext
from mpu.param import Region

KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}  # as in csrc/fused.cpp


def fits(*tensors: Tensor, accumulate: torch.dtype | None = None) -> bool:
    """Return whether csrc/fused.cpp is built and takes these: on a CPU, contiguous, of one dtype.

    accumulate: the dtype that sums must have, if any; the library sums fp64 in fp64, else in fp32.
    """
    dtype = tensors[0].dtype
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        native.load() is not None
        and dtype in KINDS
        and accumulate in (None, sums)
        and all(t.device.type == "cpu" and t.dtype == dtype and t.is_contiguous() for t in tensors)
    )


def call(name: str, dtype: torch.dtype, *args: Tensor | int | float) -> None:
    """Call weft_<name> of csrc/fused.cpp: kind, threads, then `args` with tensors as pointers."""
    library = native.load()
    assert library is not None
    getattr(library, f"weft_{name}")(
        ctypes.c_int64(KINDS[dtype]),
        ctypes.c_int64(torch.get_num_threads()),
        *(
            ctypes.c_void_p(a.data_ptr())
            if isinstance(a, Tensor)
            else (ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_double(a))
            for a in args
        ),
    )


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in the accumulation dtype.

    region: where it is used; the default is hidden states [s/t, b, h]. A norm inside a head, on
    [s, b, a/t, d], is in Region.TENSOR_PARALLEL. The sink adds the gradients of w accordingly.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        ctx: LayerContext,
        eps: float = 1e-5,
        region: Region = Region.SEQUENCE_PARALLEL,
    ) -> None:
        super().__init__()
        self.ctx, self.eps = ctx, eps
        self.weight = ctx.replicated_parameter((hidden_size,), region)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h]."""
        return _RMSNorm.apply(x, self.weight, self)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(saved_ctx: Any, x: Tensor, weight: nn.Parameter, layer: RMSNorm) -> Tensor:
        saved_ctx.layer = layer
        kind, h = layer.ctx.accumulate, x.shape[-1]
        full_weight = layer.ctx.sink.acquire(weight)
        if fits(x, full_weight, accumulate=kind):
            y, inverse = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=kind)
            rows = x.numel() // h
            call("norm_forward", x.dtype, x, full_weight, y, inverse, rows, h, layer.eps)
            layer.ctx.sink.end_use(weight)
            saved_ctx.save_for_backward(x, inverse)
            return y
        up = x.to(kind)
        length = torch.linalg.vector_norm(up, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(layer.eps).rsqrt_()
        saved_ctx.save_for_backward(x, inverse)
        y = (up * inverse).mul_(full_weight)
        layer.ctx.sink.end_use(weight)
        return y.to(x.dtype)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        # with r = 1 / sqrt(mean(x^2) + eps) and p = dy * x, over n rows of h:
        #   dw = sum_n r p;   dx = r (dy * w) - x r^3 (p . w) / h
        layer: RMSNorm = saved_ctx.layer
        ctx, kind = layer.ctx, layer.ctx.accumulate
        x, inverse = saved_ctx.saved_tensors
        h, n = x.shape[-1], x.numel() // x.shape[-1]
        dy = dy.contiguous()
        weight = ctx.sink.acquire(layer.weight)
        if fits(x, dy, weight, accumulate=kind):
            dx = torch.empty_like(x)
            parts = torch.zeros((torch.get_num_threads(), h), dtype=kind)
            call("norm_backward", x.dtype, x, weight, inverse, dy, dx, parts, n, h)
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


def apply_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Return qkv [s, b, n, d] with its first `heads` heads (q and k) rotated, the rest (v) as is.

    cos, sin: [s, 1 or b, 1, d/2]. The rotation is done in their dtype, the result is in qkv's.
    """
    return _Rope.apply(qkv, cos, sin, heads)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int, sign: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if fits(x, accumulate=cos.dtype) and fits(cos, sin):
        s, b, n, d = x.shape
        share = s * b // (cos.numel() // (d // 2))  # b where the batch shares its positions
        call("rope", x.dtype, x, cos, sin, out, s * b, n, heads, d, share, float(sign))
        return out
    out[:, :, heads:].copy_(x[:, :, heads:])
    half = x.shape[-1] // 2
    turned, target = x[:, :, :heads], out[:, :, :heads]
    if x.dtype != cos.dtype:
        turned, target = turned.to(cos.dtype), torch.empty_like(turned, dtype=cos.dtype)
    first, second = turned[..., :half], turned[..., half:]
    torch.mul(first, cos, out=target[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=target[..., half:]).addcmul_(first, sin, value=sign)
    if x.dtype != cos.dtype:
        out[:, :, :heads].copy_(target)
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(saved_ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        saved_ctx.cos, saved_ctx.sin, saved_ctx.heads = cos, sin, heads
        return _rotate(qkv, cos, sin, heads, 1.0)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        # a rotation's transpose is the rotation by the opposite angle
        return _rotate(dy, saved_ctx.cos, saved_ctx.sin, saved_ctx.heads, -1.0), None, None, None


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of gate_up's halves: [..., 2f] -> [..., f]. Saves its input only."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(saved_ctx: Any, gate_up: Tensor) -> Tensor:
        saved_ctx.save_for_backward(gate_up)
        size = gate_up.shape[-1] // 2
        if fits(gate_up):
            y = gate_up.new_empty((*gate_up.shape[:-1], size))
            call("swiglu_forward", y.dtype, gate_up, y, y.numel() // size, size)
            return y
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> Tensor:
        # silu(g) = g sig(g);  silu'(g) = sig(g) (1 + g (1 - sig(g)))
        (gate_up,) = saved_ctx.saved_tensors
        grad, dy = torch.empty_like(gate_up), dy.contiguous()
        if fits(gate_up, dy):
            size = dy.shape[-1]
            call("swiglu_backward", dy.dtype, gate_up, dy, grad, dy.numel() // size, size)
            return grad
        gate, up = gate_up.chunk(2, -1)
        d_gate, d_up = grad.chunk(2, -1)
        torch.mul(dy, F.silu(gate), out=d_up)
        torch.mul(dy, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return grad
