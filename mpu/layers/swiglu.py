# SPDX-License-Identifier: Apache-2.0
"""Gate one half of the features by the other: silu(gate) * up (Shazeer 2020)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu import native


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2f] -> [..., f]: the first half gates the second. Saves its input only."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(f: Any, gate_up: Tensor) -> Tensor:
        f.save_for_backward(gate_up)
        size = gate_up.shape[-1] // 2
        if native.fits(gate_up):
            y = gate_up.new_empty((*gate_up.shape[:-1], size))
            native.call("swiglu_forward", y.dtype, gate_up, y, y.numel() // size, size)
            return y
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(f: Any, dy: Tensor) -> Tensor:
        # silu(g) = g sig(g);  silu'(g) = sig(g) (1 + g (1 - sig(g)))
        (gate_up,) = f.saved_tensors
        grad, dy = torch.empty_like(gate_up), dy.contiguous()
        if native.fits(gate_up, dy):
            size = dy.shape[-1]
            native.call("swiglu_backward", dy.dtype, gate_up, dy, grad, dy.numel() // size, size)
            return grad
        gate, up = gate_up.chunk(2, -1)
        d_gate, d_up = grad.chunk(2, -1)
        torch.mul(dy, F.silu(gate), out=d_up)
        torch.mul(dy, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return grad
