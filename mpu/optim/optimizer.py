# SPDX-License-Identifier: Apache-2.0
"""Update the weights: AdamW on flat buckets, with global norm and clipping (docs/numerics.md).

Weights and gradients lie in flat buckets (mpu/zero/bucket.py), so one fused kernel call updates
many parameters; bf16 weights have masters in the accumulation dtype. A rank holds masters and
moments of the part of each bucket that it owns: all of it at stage 0, an equal share from stage 1
on. After the update whole weights are gathered, in their own dtype, with overlap_param_gather under
the next forward; at stage 3 they are gathered when they are used.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpu.grid import Grid
from mpu.optim.backends import make
from mpu.optim.offload import Offload
from mpu.optim.optimizer_state import OptimizerState
from mpu.zero.layout import runs
from mpu.zero.norm import GlobalNorm
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer


class Optimizer(OptimizerState):
    """AdamW (Loshchilov and Hutter 2019) over the parameters of `sink`'s buckets.

    group(name, param) -> (weight decay applies, the decoupled learning rate applies). clip: the
    largest global norm a step uses; 0 turns clipping off. backend: torch, triton, apex or te
    (mpu/optim/backends.py). cpu_offload: keep masters and moments in host memory.
    """

    def __init__(
        self,
        module: nn.Module,
        sink: ParamAndGradBuffer,
        grid: Grid,
        group: Callable[[str, nn.Parameter], tuple[bool, bool]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float = 1.0,
        backend: str = "torch",
        cpu_offload: bool = False,
    ) -> None:
        self.sink, self.grid, self.clip = sink, grid, clip
        grads = [bucket.grad_shard for bucket in sink.buckets]
        weights = [bucket.param_shard for bucket in sink.buckets]
        self.offload = Offload(grads, weights) if cpu_offload else None
        if self.offload:
            grads, self.masters = self.offload.gradients, self.offload.masters
        else:  # masters of the owned part, in the accumulation dtype
            self.masters = [w if w.dtype == sink.dtype else w.to(sink.dtype) for w in weights]
        self._segment_of = []
        rounded: dict[Tensor, Tensor] = {}  # the narrower weights of a segment
        together: list[dict[tuple[bool, bool], list[nn.Parameter]]] = []  # one dict an Adam
        for bucket, master, grad in zip(sink.buckets, self.masters, grads, strict=True):
            here = []
            if self.offload or not together:
                together.append({})
            for first, last, kind in runs(bucket.params, bucket.length, group):
                low, high = max(first, bucket.low), min(last, bucket.high)
                if low >= high:
                    continue
                segment = nn.Parameter(master[low - bucket.low : high - bucket.low])
                segment.grad = grad[low - bucket.low : high - bucket.low]
                together[-1].setdefault(kind, []).append(segment)
                if bucket.param_shard.dtype != master.dtype:
                    rounded[segment] = bucket.param_shard[low - bucket.low : high - bucket.low]
                here.append((low, high, segment))
            self._segment_of.append(here)
        self.adams = []
        for segments in together:
            groups = [
                {
                    "params": found,
                    "weight_decay": weight_decay if decay else 0.0,
                    "decoupled": decoupled,
                }
                for (decay, decoupled), found in segments.items()
            ]
            made = make(backend, groups, lr=lr, betas=betas, eps=eps, weights=rounded)
            self.adams.append(made)
        self._adam_of = [self.adams[i if self.offload else 0] for i in range(len(sink.buckets))]
        self.norm = GlobalNorm(module, sink.buckets, grid)

    def grad_norm(self) -> Tensor:
        """Return the global norm of the gradients: a scalar on the device, fp64."""
        return self.norm([bucket.grad_shard for bucket in self.sink.buckets])

    def params_norm(self) -> Tensor:
        """Return the global norm of the (master) weights: a scalar on the device, fp64."""
        return self.norm(self.masters)

    def step(
        self, lr: float, decoupled_lr: float | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Clip and update; return (norm, found_inf), both on the device, without waiting for it.

        decoupled_lr: for the parameters to which `group` applies it; None: lr. scale: multiplies
        the gradients first (tokens assumed / tokens counted). Where the norm is not finite every
        rank skips the update, since all see the same norm.
        """
        norm = self.grad_norm()
        if scale is not None:
            norm = norm * scale
        factor = torch.ones_like(norm) if scale is None else scale.to(norm)
        if self.clip > 0:
            factor = factor * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        found_inf = (~torch.isfinite(norm)).float()
        for group in (group for adam in self.adams for group in adam.groups):
            group["lr"] = decoupled_lr if group["decoupled"] and decoupled_lr is not None else lr
        if self.offload:
            self.offload.update(self.adams, factor, found_inf)
            self.sink.gather_weights()
        else:
            self.adams[0].step(factor, found_inf)
            self.sink.gather_weights() if self.adams[0].rounds else self.weights_from_masters()
        return norm, found_inf

    def weights_from_masters(self) -> None:
        """Round the masters into the weights, after an update or a load; gather the weights."""
        if self.offload:
            self.offload.weights_from_masters()
        for bucket, master in zip(self.sink.buckets, self.masters, strict=True):
            if master.dtype != bucket.param_shard.dtype and not self.offload:
                bucket.param_shard.copy_(master)
        self.sink.gather_weights()
