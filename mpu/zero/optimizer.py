# SPDX-License-Identifier: Apache-2.0
"""Update the weights: AdamW on flat buckets, with the global norm and clipping of the numerics
contract.

Level 0: every data-parallel rank holds all of the state. Weights live in flat tensors laid out like
the gradient buckets, so one fused kernel call updates a bucket; bf16 weights have masters in the
accumulation dtype.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mpu.comm.collectives import gather_bytes, sum_in_order
from mpu.grid import Grid
from mpu.param import placement_of
from mpu.zero.buckets import BLOCK, GradientBuckets


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) over the parameters of `sink`'s buckets.

    group(name, param) -> (weight decay applies, the decoupled learning rate applies). clip: the
    largest global norm a step uses; 0 turns clipping off.
    """

    def __init__(
        self,
        module: nn.Module,
        sink: GradientBuckets,
        grid: Grid,
        group: Callable[[str, nn.Parameter], tuple[bool, bool]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float = 1.0,
    ) -> None:
        self.sink, self.grid, self.clip = sink, grid, clip
        self.weights: list[Tensor] = []  # flat, in the parameters' dtype
        self.masters: list[
            Tensor
        ] = []  # flat, in the accumulation dtype; the same tensor where dtypes agree
        segments: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        self._segment_of: list[list[tuple[int, int, nn.Parameter]]] = []
        for bucket in sink.buckets:
            dtype = bucket.params[0][1].dtype
            flat = torch.zeros(len(bucket.grad), dtype=dtype, device=bucket.grad.device)
            for _, param, start in bucket.params:
                home = flat[start : start + param.numel()].view(param.shape)
                home.copy_(param.data)
                param.data = home
            master = flat if dtype == sink.dtype else flat.to(sink.dtype)
            self.weights.append(flat)
            self.masters.append(master)
            here = []
            for low, high, kind in _runs(bucket.params, len(flat), group):
                segment = nn.Parameter(master[low:high])
                segment.grad = bucket.grad[low:high]
                segments.setdefault(kind, []).append(segment)
                here.append((low, high, segment))
            self._segment_of.append(here)
        groups = [
            {
                "params": found,
                "weight_decay": weight_decay if decay else 0.0,
                "decoupled": decoupled,
            }
            for (decay, decoupled), found in segments.items()
        ]
        self.adam: Any = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._canonical(module)

    def _canonical(self, module: nn.Module) -> None:
        """Fix the norm's order: each parameter's own blocks, then the whole model's parameters.

        A parameter is known by its name, the same in every layout. Of copies one is counted.
        """
        place, base = {}, 0
        for bucket in self.sink.buckets:
            for _, param, start in bucket.params:
                place[param] = (base + start) // BLOCK
            base += len(bucket.grad)
        order: list[int] = []
        counted: list[bool] = []
        lengths: list[int] = []
        names: list[str] = []
        for name, param in module.named_parameters():
            placement, blocks = placement_of(param), -(-param.numel() // BLOCK)
            if any(axis.rank for axis in placement.copies):
                continue  # another layer's copy stands for it
            order += range(place[param], place[param] + blocks)
            counted += [placement.first_holder] * blocks
            lengths.append(blocks)
            names.append(name)
        device = self.sink.buckets[0].grad.device
        self._order = torch.tensor(order, device=device)
        self._counted = torch.tensor(counted, device=device)
        self._lengths = torch.tensor(lengths, device=device)
        lists = gather_bytes("\n".join(names).encode(), self.grid.pp, device)
        every = sorted({name for text in lists for name in text.decode().split("\n")})
        self._row = torch.tensor([every.index(name) for name in names], device=device)
        self._rows = len(every)

    def _norm(self, tensors: list[Tensor]) -> Tensor:
        """Global 2-norm in fp64: blocks of fixed size, folded in order to one square a parameter;
        those summed over tp in rank order, then over the whole model's parameters in name order.

        The blocks are a parameter's own and the order is the names', so the bits do not depend on
        how buckets are cut or shared, nor on the pipeline.
        """
        blocks = [torch.linalg.vector_norm(t.view(-1, BLOCK), dim=1).double() for t in tensors]
        squares = torch.cat(blocks)[self._order].square_().mul_(self._counted)
        own = torch.segment_reduce(squares, "sum", lengths=self._lengths)
        every = own.new_zeros(self._rows)
        every[self._row] = sum_in_order(own, self.grid.tp)
        return sum_in_order(every, self.grid.pp).sum().sqrt()

    def grad_norm(self) -> Tensor:
        """Return the global norm of the gradients: a scalar on the device, fp64."""
        return self._norm([b.grad for b in self.sink.buckets])

    def params_norm(self) -> Tensor:
        """Return the global norm of the (master) weights: a scalar on the device, fp64."""
        return self._norm(self.masters)

    def step(
        self, lr: float, decoupled_lr: float | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Clip and update; return (norm, found_inf), both on the device, without waiting for it.

        decoupled_lr: of the parameters that `group` says; None: lr.
        scale: multiply the gradients by this first (tokens assumed / tokens counted). The update is
        skipped on every rank when the norm is not finite, since all see the same norm.
        """
        norm = self.grad_norm()
        if scale is not None:
            norm = norm * scale
        factor = torch.ones_like(norm) if scale is None else scale.to(norm)
        if self.clip > 0:
            factor = factor * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        found_inf = (~torch.isfinite(norm)).float()
        for group in self.adam.param_groups:
            group["lr"] = decoupled_lr if group["decoupled"] and decoupled_lr is not None else lr
        if self.sink.dtype == torch.float64:  # the fused kernel takes its scale in fp32 only
            for bucket in self.sink.buckets:
                bucket.grad.mul_(factor)
            self.adam.grad_scale = None
        else:
            self.adam.grad_scale = (1.0 / factor).float()  # the kernel divides by it
        self.adam.found_inf = found_inf
        self.adam.step()
        self.weights_from_masters()
        return norm, found_inf

    def steps_done(self) -> int:
        """Count the updates made (skipped ones do not count)."""
        for state in self.adam.state.values():
            return int(state["step"])
        return 0

    def load_steps_done(self, steps: int) -> None:
        """Set the count of updates, which Adam's bias correction uses. Allocates the state if need
        be.
        """
        for group in self.adam.param_groups:
            for segment in group["params"]:
                state = self.adam.state[segment]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(segment)
                    state["exp_avg_sq"] = torch.zeros_like(segment)
                state["step"] = torch.tensor(float(steps), device=segment.device)

    def named_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter name, kind, local tensor) for kind in master, exp_avg, exp_avg_sq.

        Tensors are views: writing to them loads the state. Masters only where they differ from the
        weights.
        """
        if not self.adam.state:
            self.load_steps_done(0)
        for bucket, master, weight, segments in zip(
            self.sink.buckets, self.masters, self.weights, self._segment_of, strict=True
        ):
            for name, param, start in bucket.params:
                end = start + param.numel()
                if master is not weight:
                    yield name, "master", master[start:end].view(param.shape)
                low, segment = next((lo, s) for lo, hi, s in segments if lo <= start and end <= hi)
                for kind in ("exp_avg", "exp_avg_sq"):
                    flat = self.adam.state[segment][kind]
                    yield name, kind, flat[start - low : end - low].view(param.shape)

    def weights_from_masters(self) -> None:
        """Round the masters into the weights, after loading."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight is not master:
                weight.copy_(master)

    def masters_from_weights(self) -> None:
        """Widen the weights into the masters, after the weights alone were loaded."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight is not master:
                master.copy_(weight)


def _runs(
    params: list[tuple[str, nn.Parameter, int]],
    length: int,
    group: Callable[[str, nn.Parameter], tuple[bool, bool]],
) -> list[tuple[int, int, tuple[bool, bool]]]:
    """Cut a bucket into runs of parameters that are treated alike: (low, high, group)."""
    runs: list[tuple[int, int, tuple[bool, bool]]] = []
    for name, param, start in params:
        kind = group(name, param)
        if runs and runs[-1][2] == kind:
            continue
        if runs:
            runs[-1] = (runs[-1][0], start, runs[-1][2])
        runs.append((start, length, kind))
    return runs
