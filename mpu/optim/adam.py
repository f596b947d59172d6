# SPDX-License-Identifier: Apache-2.0
"""AdamW: its UpdateRule, and torch's own fused kernel on flat segments of weights.

mpu/optim/adam_backends.py has the other kernels. Every backend reads the factor of the gradients
and the decision to skip on the device, so a step never waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpu import torch_private
from mpu.accelerators import needs_fp32
from mpu.optim import adam_backends
from mpu.optim.interface import Parts, StateKind, Updater, UpdateRule, divided


@dataclass(frozen=True)
class AdamW(UpdateRule):
    """AdamW (Loshchilov and Hutter 2019). backend: the kernel's source: torch, apex or te.

    Check with mpu/accelerators.py that it is available. `updater` raises ValueError if the backend
    does not support the masters' dtype.
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
        return adam_backends.Fused(self.backend, parts, self.betas, self.eps)


class TorchAdam(Updater):
    """torch's fused kernel, called as torch.optim.AdamW calls it, with the same bits.

    torch.optim.AdamW itself is not used: making one imports torch's compiler, which doubles the
    number of modules imported at startup.
    """

    def __init__(self, rule: AdamW, parts: Parts) -> None:
        self._rule = rule
        self.groups = [{**group, "lr": 0.0} for group in parts.groups]
        self._segments = parts.segments
        self._states: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        grad_scale = None
        if self._segments[0].dtype == torch.float64:  # the kernel takes its scale in fp32 only
            # a NaN factor would remain in the padding between the parameters of a bucket
            factor = torch.where(found_inf > 0, 0.0, factor)
            for segment in self._segments:
                assert segment.grad is not None
                segment.grad.mul_(factor)
        else:
            grad_scale = (1.0 / factor).float()  # the kernel divides by it
        beta1, beta2 = self._rule.betas
        for group in self.groups:
            params = [segment for segment in group["params"] if segment.grad is not None]
            if not params:
                continue
            states = [self._state(segment) for segment in params]
            steps, first, second = (
                [state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq")
            )
            torch_private.each("add_", steps, 1)
            torch_private.adamw_(
                params, [segment.grad for segment in params], first, second, steps,
                lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
                eps=divided(self._rule.eps, group), grad_scale=grad_scale, found_inf=found_inf,
            )  # fmt: skip
            torch_private.each("sub_", steps, [found_inf] * len(steps))

    def _state(self, segment: Tensor) -> dict[str, Tensor]:
        if segment not in self._states:
            self._states[segment] = {
                "step": torch.zeros((), dtype=torch.float32, device=segment.device),
                "exp_avg": torch.zeros_like(segment, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(segment, requires_grad=False),
            }
        return self._states[segment]

    def state(self, segment: Tensor) -> dict[str, Tensor]:
        state = self._state(segment)
        return {kind.name: state[kind.name] for kind in AdamW.kinds}

    @property
    def steps(self) -> int:
        state = self._states.get(self._segments[0])
        return 0 if state is None else int(state["step"])

    def set_steps(self, steps: int) -> None:
        for segment in self._segments:
            self._state(segment)["step"].fill_(steps)
