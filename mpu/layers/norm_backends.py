# SPDX-License-Identifier: Apache-2.0
"""RMSNorm by the kernels of NVIDIA apex or Transformer Engine, if --norm-backend names one.

Both packages wrap two functions of a CUDA extension, forward and backward, in autograd functions
and modules of their own. Weights here belong to a sink, which gathers them at ZeRO stage 3 and adds
their gradients in fp32, so the two functions are called directly, as the packages call them:

    apex: fused_layer_norm_cuda     rms_forward_affine(x, shape, w, eps) -> y, r
                                    rms_backward_affine(dy, r, x, shape, w, eps, False) -> dx, dw
    te: transformer_engine_torch    rmsnorm_fwd(x, w, eps, None, None, dtype, 0, False) -> y, _, r
                                    rmsnorm_bwd(dy, x, r, w, 0, False) -> dx, dw

x [n, h], r [n], dw in the dtype of w. Residual adds are separate torch operations.
"""

import importlib
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from mpu.accelerators import APEX_NORM, TE_KERNELS
from mpu.gradients import GradientSink
from mpu.layers import fused_gpu


def norm_backend(name: str) -> Any:
    """Return an object with the `norm_forward` and `norm_backward` of mpu/layers/fused_gpu.py.

    name: "weft", "apex" or "te"; check with mpu/accelerators.py first that it is available.
    """
    if name == "weft":
        return fused_gpu
    return _Apex() if name == "apex" else _TransformerEngine()


class _Package(ABC):
    """`norm_forward` and `norm_backward` of fused_gpu.py, by a package's two functions."""

    def norm_forward(
        self, x: Tensor, branch: Tensor | None, w: Tensor, eps: float, kind: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return norm(x + branch), x + branch, and r = 1 / sqrt(mean square + eps) [..., 1]."""
        x = x.contiguous() if branch is None else x + branch
        y, r = self.forward(x.view(-1, x.shape[-1]), w.detach(), eps)
        return y.view(x.shape), x, r.view(*x.shape[:-1], 1)

    def norm_backward(
        self,
        x: Tensor,
        w: Tensor,
        r: Tensor,
        dy: Tensor,
        more: Tensor | None,
        eps: float,
        sink: GradientSink,
        weight: nn.Parameter,
    ) -> Tensor:
        """Return dx, plus `more` if given; add the gradient of the weight to the sink, unless it is
        frozen.
        """
        h = x.shape[-1]
        dx, dw = self.backward(dy.view(-1, h), x.view(-1, h), r.view(-1), w.detach(), eps)
        if weight.requires_grad:
            sink.add(weight, dw)
        dx = dx.view(x.shape)
        return dx if more is None else dx + more

    @abstractmethod
    def forward(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x [n, h] -> y [n, h], r [n]."""

    @abstractmethod
    def backward(
        self, dy: Tensor, x: Tensor, r: Tensor, w: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """dy, x [n, h] -> dx [n, h], dw [h]."""


class _Apex(_Package):
    def __init__(self) -> None:
        self.kernels = importlib.import_module(APEX_NORM)

    def forward(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, r = self.kernels.rms_forward_affine(x, tuple(w.shape), w, eps)
        return y, r

    def backward(
        self, dy: Tensor, x: Tensor, r: Tensor, w: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        given = (dy, r, x, tuple(w.shape), w, eps)  # its arguments have no names
        dx, dw = self.kernels.rms_backward_affine(*given, False)
        return dx, dw


class _TransformerEngine(_Package):
    def __init__(self) -> None:
        self.dtypes = importlib.import_module("transformer_engine.pytorch.constants").TE_DType
        self.kernels = importlib.import_module(TE_KERNELS)

    def forward(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, _, r = self.kernels.rmsnorm_fwd(
            input=x, weight=w, eps=eps, ln_out=None, quantizer=None,
            otype=self.dtypes[x.dtype], sm_margin=0, zero_centered_gamma=False,
        )  # fmt: skip
        return y, r

    def backward(
        self, dy: Tensor, x: Tensor, r: Tensor, w: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        dx, dw = self.kernels.rmsnorm_bwd(dy, x, r, w, 0, False)
        return dx, dw
