# SPDX-License-Identifier: Apache-2.0
"""Gate one half of the features by the other: silu(gate) * up (Shazeer 2020)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2f] -> [..., f]: the first half gates the second. Saves its input only."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(f: Any, gate_up: Tensor) -> Tensor:
        f.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(f: Any, dy: Tensor) -> Tensor:
        # silu(g) = g sig(g);  silu'(g) = sig(g) (1 + g (1 - sig(g)))
        (gate_up,) = f.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        d_gate, d_up = grad.chunk(2, -1)
        torch.mul(dy, F.silu(gate), out=d_up)
        torch.mul(dy, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return grad
