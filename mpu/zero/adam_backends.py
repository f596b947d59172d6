# SPDX-License-Identifier: Apache-2.0
"""Make the AdamW that `--optimizer-backend` names: torch's, or an accelerator that is installed.

torch's own fused kernel needs nothing else. apex's and Transformer Engine's FusedAdam are used
where they are installed, and a message says what is missing where they are not.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from mpu.zero.adam import Adam, TorchAdam

# Backends that are not torch's: name in messages, FusedAdam's module, its kernels' module.
PACKAGES = {
    "apex": ("NVIDIA apex, built with its CUDA extensions,", "apex.optimizers", "amp_C"),
    "te": (
        "Transformer Engine",
        "transformer_engine.pytorch.optimizers",
        "transformer_engine_torch",
    ),
}


def make(
    backend: str,
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> Adam:
    """Make the AdamW of a backend (torch, apex or te). Call `missing` first.

    Raises ValueError where the masters' dtype is not what the backend updates.
    """
    if backend == "torch":
        return TorchAdam(groups, lr, betas, eps)
    dtype = groups[0]["params"][0].dtype
    if dtype != torch.float32:
        raise ValueError(_needs_fp32(backend, dtype))
    return _Fused(PACKAGES[backend][1], groups, lr, betas, eps)


def missing(backend: str, device_type: str, dtype: torch.dtype = torch.float32) -> str:
    """Return why a backend cannot update masters of `dtype` on such a device, or "" if it can.

    Imports the backend's package, so call it for the chosen backend only.
    """
    if backend == "torch":
        return ""
    flag, (package, module, kernels) = f"--optimizer-backend {backend}", PACKAGES[backend]
    if device_type != "cuda":
        return f"{flag} has CUDA kernels only: use --optimizer-backend torch on {device_type}"
    if dtype != torch.float32:
        return _needs_fp32(backend, dtype)
    try:
        _fused_adam(module)
        importlib.import_module(kernels)
    except Exception as error:  # a package that was built for another torch raises anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return (
            f"{flag} needs {package} which cannot be used here ({why}): "
            "install it or use --optimizer-backend torch"
        )
    return ""


def _fused_adam(module: str) -> Any:
    return importlib.import_module(module).FusedAdam


def _needs_fp32(backend: str, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return (
        f"--optimizer-backend {backend} updates fp32 masters only, not {name}: "
        "use --optimizer-backend torch"
    )


class _Scaler:
    """The part of torch's GradScaler that FusedAdam calls: its scale and its found_inf."""

    def __init__(self, scale: Tensor, found_inf: Tensor) -> None:
        self._scale, self._found_inf = scale, found_inf

    def _get_scale_async(self) -> Tensor:
        return self._scale

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return {self._found_inf.device: self._found_inf}


class _Fused(Adam):
    """FusedAdam of apex or Transformer Engine, which share their interface, in capturable mode.

    In that mode a group's "lr" and "step" are tensors on the device. The kernel multiplies the
    gradients by one over the scaler's scale, and returns at once where found_inf is 1. But it
    counts a skipped step late: the first group's "step" follows found_inf of the step before. So
    the count is kept here and handed over at every step.
    """

    def __init__(
        self,
        module: str,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.groups = [{**group, "lr": lr} for group in groups]
        theirs = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]
        self._adam: Any = _fused_adam(module)(
            theirs, lr=lr, betas=betas, eps=eps, adam_w_mode=True, capturable=True
        )
        device = groups[0]["params"][0].device
        self._steps = torch.zeros(1, dtype=torch.int, device=device)
        for group in self._adam.param_groups:
            group["lr"] = torch.zeros((), dtype=torch.float32, device=device)

    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        for ours, theirs in zip(self.groups, self._adam.param_groups, strict=True):
            theirs["lr"].fill_(ours["lr"])
            theirs["step"] = self._steps.clone()
        self._adam._dummy_overflow_buf.zero_()  # the last step's found_inf: count this step anyway
        self._adam.step(grad_scaler=_Scaler(1.0 / factor, found_inf))
        self._steps += (found_inf != 1).to(torch.int)

    def moments(self, segment: Tensor) -> tuple[Tensor, Tensor]:
        state = self._adam.state[segment]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(segment)
            state["exp_avg_sq"] = torch.zeros_like(segment)
        return state["exp_avg"], state["exp_avg_sq"]

    @property
    def steps(self) -> int:
        return int(self._steps)

    def set_steps(self, steps: int) -> None:
        self._steps.fill_(steps)
