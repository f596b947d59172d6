# SPDX-License-Identifier: Apache-2.0
"""SwiGLU of rows [gate, up], forward and backward, each in one pass.

forward    y = g sig(g) u
backward   dg = dy u sig(g) (1 + g (1 - sig(g)));  du = dy g sig(g)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import declared, passes
from mpu.kernels.launch import cdiv, next_power_of_2

LANES = 1024  # elements of a row per program


@triton.jit
def gated(gate, up):
    """Return y = silu(gate) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gated_backward(gate, up, grad):
    """Return d_gate and d_up, given grad, the gradient of y."""
    sig = 1.0 / (1.0 + tl.exp(-gate))
    return grad * up * sig * (1.0 + gate * (1.0 - sig)), grad * gate * sig


@declared(passes("x", "y"), x="whole same", y="whole same")
@triton.jit
def swiglu_forward_kernel(x, y, width, LANES: tl.constexpr):
    """Compute y [rows, width] from x [rows, 2 width]."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    gate = tl.load(x + row * 2 * width + at, at < width, 0.0).to(WIDE)
    up = tl.load(x + (row * 2 + 1) * width + at, at < width, 0.0).to(WIDE)
    tl.store(y + row * width + at, gated(gate, up).to(y.dtype.element_ty), at < width)


@declared(passes("x dy", "dx"), x="whole same", dy="whole same", dx="whole same")
@triton.jit
def swiglu_backward_kernel(x, dy, dx, width, LANES: tl.constexpr):
    """Compute dx [rows, 2 width] from x and dy [rows, width]."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    here = row * 2 * width + at
    gate = tl.load(x + here, at < width, 0.0).to(WIDE)
    up = tl.load(x + here + width, at < width, 0.0).to(WIDE)
    grad = tl.load(dy + row * width + at, at < width, 0.0).to(WIDE)
    d_gate, d_up = gated_backward(gate, up, grad)
    tl.store(dx + here, d_gate.to(dx.dtype.element_ty), at < width)
    tl.store(dx + here + width, d_up.to(dx.dtype.element_ty), at < width)


def swiglu_forward(x: Tensor) -> Tensor:
    """Return silu(gate) * up: x [..., 2 width] -> [..., width]."""
    width = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], width))
    lanes = min(LANES, next_power_of_2(width))
    grid = (y.numel() // width, cdiv(width, lanes))
    swiglu_forward_kernel.launch(grid, x=x, y=y, width=width, LANES=lanes)
    return y


def swiglu_backward(x: Tensor, dy: Tensor) -> Tensor:
    """Return dx, given x and dy [..., width]."""
    width, dx = dy.shape[-1], torch.empty_like(x)
    lanes = min(LANES, next_power_of_2(width))
    grid = (dy.numel() // width, cdiv(width, lanes))
    swiglu_backward_kernel.launch(grid, x=x, dy=dy, dx=dx, width=width, LANES=lanes)
    return dx
