# SPDX-License-Identifier: Apache-2.0
"""AdamW on flat pieces of weights: the interface of every backend, and torch's own fused kernel.

mpu/optim/backends.py has the other kernels. Every backend reads the factor of the gradients and
the decision to skip on the device, so a step never waits for it.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Adam(ABC):
    """AdamW (Loshchilov and Hutter 2019) over groups of segments, leaf tensors with `.grad`.

    groups: dicts with "params", "weight_decay", "lr" and whatever else the caller put there; "lr"
    is read at every step.
    """

    groups: list[dict[str, Any]]
    rounds = False  # whether `step` also writes the narrower weights, which then need no copy

    @abstractmethod
    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        """Update with gradients times `factor`; where found_inf is 1, change nothing at all.

        Both are scalars on the segments' device, found_inf in fp32. The gradients are used up: a
        backend may leave them multiplied or not.
        """

    @abstractmethod
    def moments(self, segment: Tensor) -> tuple[Tensor, Tensor]:
        """Return (exp_avg, exp_avg_sq) of a segment, zeros before the first step; not copies."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Return the number of updates made, without skipped ones. Waits for the device."""

    @abstractmethod
    def set_steps(self, steps: int) -> None:
        """Set the number of updates, which the bias correction uses."""


class TorchAdam(Adam):
    """torch.optim.AdamW's fused kernel."""

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self._adam: Any = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.groups = self._adam.param_groups
        self._segments = [segment for group in self.groups for segment in group["params"]]

    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        self._adam.grad_scale = None
        if self._segments[0].dtype == torch.float64:  # the kernel takes its scale in fp32 only
            for segment in self._segments:
                segment.grad.mul_(factor)
        else:
            self._adam.grad_scale = (1.0 / factor).float()  # the kernel divides by it
        self._adam.found_inf = found_inf
        self._adam.step()

    def _state(self, segment: Tensor) -> dict[str, Tensor]:
        state = self._adam.state[segment]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=segment.device)
            state["exp_avg"] = torch.zeros_like(segment)
            state["exp_avg_sq"] = torch.zeros_like(segment)
        return state

    def moments(self, segment: Tensor) -> tuple[Tensor, Tensor]:
        state = self._state(segment)
        return state["exp_avg"], state["exp_avg_sq"]

    @property
    def steps(self) -> int:
        return int(self._adam.state[self._segments[0]].get("step", 0))

    def set_steps(self, steps: int) -> None:
        for segment in self._segments:
            self._state(segment)["step"].fill_(steps)
