# SPDX-License-Identifier: Apache-2.0
"""AdamW's kernels for `--optimizer-backend`, besides torch's own (mpu/optim/adam.py).

They are FusedAdam of apex and of Transformer Engine, if installed (mpu/accelerators.py).
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from mpu.accelerators import FUSED_ADAM
from mpu.optim.interface import Parts, Updater, divided


def _fused_adam(module: str) -> Any:
    return importlib.import_module(module).FusedAdam


class _Scaler:
    """The part of torch's GradScaler that FusedAdam calls: its scale and its found_inf."""

    def __init__(self, scale: Tensor, found_inf: Tensor) -> None:
        self._scale, self._found_inf = scale, found_inf

    def _get_scale_async(self) -> Tensor:
        return self._scale

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return {self._found_inf.device: self._found_inf}


class Fused(Updater):
    """FusedAdam of apex or Transformer Engine, which share their interface, in capturable mode.

    In that mode a group's "lr" and "step" are tensors on the device. The kernel multiplies the
    gradients by one over the scaler's scale, and returns at once if found_inf is 1. But it accounts
    for a skipped step one step late: the first group's "step" depends on the previous step's
    found_inf. So the count is stored here and passed at every step.
    """

    def __init__(self, backend: str, parts: Parts, betas: tuple[float, float], eps: float) -> None:
        self.groups = [{**group, "lr": 0.0} for group in parts.groups]
        theirs = [
            {"params": g["params"], "weight_decay": g["weight_decay"], "eps": divided(eps, g)}
            for g in parts.groups
        ]
        self._adam: Any = _fused_adam(FUSED_ADAM[backend])(
            theirs, lr=0.0, betas=betas, eps=eps, adam_w_mode=True, capturable=True
        )
        device = parts.segments[0].device
        self._steps = torch.zeros(1, dtype=torch.int, device=device)
        for group in self._adam.param_groups:
            group["lr"] = torch.zeros((), dtype=torch.float32, device=device)

    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        for ours, theirs in zip(self.groups, self._adam.param_groups, strict=True):
            theirs["lr"].fill_(ours["lr"])
            theirs["step"] = self._steps.clone()
        self._adam._dummy_overflow_buf.zero_()  # discard the last step's found_inf
        self._adam.step(grad_scaler=_Scaler(1.0 / factor, found_inf))
        self._steps += (found_inf != 1).to(torch.int)

    def state(self, segment: Tensor) -> dict[str, Tensor]:
        state = self._adam.state[segment]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(segment)
            state["exp_avg_sq"] = torch.zeros_like(segment)
        return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}

    @property
    def steps(self) -> int:
        return int(self._steps)

    def set_steps(self, steps: int) -> None:
        self._steps.fill_(steps)
