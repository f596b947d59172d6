# SPDX-License-Identifier: Apache-2.0
"""AdamW: what it declares, and torch's own fused kernel on flat pieces of weights.

mpu/optim/backends.py has the other kernels. Every backend reads the factor of the gradients and
the decision to skip on the device, so a step never waits for it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpu.accelerators import needs_fp32
from mpu.optim import backends
from mpu.optim.interface import Parts, StateKind, Updater, UpdateRule


@dataclass(frozen=True)
class AdamW(UpdateRule):
    """AdamW (Loshchilov and Hutter 2019). backend: torch, triton, apex or te: whose kernel.

    Ask mpu/accelerators.py before `updater`, which raises ValueError where the masters' dtype is
    not what the backend updates.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    backend: str = "torch"
    name = "AdamW"
    kinds = (StateKind("exp_avg"), StateKind("exp_avg_sq"))

    def updater(self, parts: Parts) -> Updater:
        if self.backend == "torch":
            return TorchAdam(self, parts)
        dtype = parts.segments[0].dtype
        if dtype != torch.float32:
            raise ValueError(needs_fp32(self.backend, dtype))
        if self.backend == "triton":
            return backends.Triton(self, parts, self.betas, self.eps)
        return backends.Fused(self.backend, parts, self.betas, self.eps)


class TorchAdam(Updater):
    """torch.optim.AdamW's fused kernel."""

    def __init__(self, rule: AdamW, parts: Parts) -> None:
        self._adam: Any = torch.optim.AdamW(
            parts.groups, lr=0.0, betas=rule.betas, eps=rule.eps, fused=True
        )
        self.groups = self._adam.param_groups
        self._segments = parts.segments

    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        self._adam.grad_scale = None
        if self._segments[0].dtype == torch.float64:  # the kernel takes its scale in fp32 only
            # a factor that is NaN would stay in what lies between the parameters of a bucket
            factor = torch.where(found_inf > 0, 0.0, factor)
            for segment in self._segments:
                assert segment.grad is not None
                segment.grad.mul_(factor)
        else:
            self._adam.grad_scale = (1.0 / factor).float()  # the kernel divides by it
        self._adam.found_inf = found_inf
        self._adam.step()

    def _state(self, segment: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._adam.state[segment]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=segment.device)
            state["exp_avg"] = torch.zeros_like(segment)
            state["exp_avg_sq"] = torch.zeros_like(segment)
        return state

    def state(self, segment: Tensor) -> dict[str, Tensor]:
        state = self._state(segment)
        return {kind.name: state[kind.name] for kind in AdamW.kinds}

    @property
    def steps(self) -> int:
        return int(self._adam.state[self._segments[0]].get("step", 0))

    def set_steps(self, steps: int) -> None:
        for segment in self._segments:
            self._state(segment)["step"].fill_(steps)
