# SPDX-License-Identifier: Apache-2.0
"""Gradients in `param.grad`, for a program that uses mpu's layers with a torch optimizer.

    ctx = LayerContext(grid, sequence_parallel=True, sink=(sink := ParamGrad()))
    loss.backward()                      layers add their weights' gradients to `.grad`
    sink.finish_grad_sync(model, grid)   then sum those of norms over tp, and all over dp x cp
    optimizer.step(); optimizer.zero_grad()

A training run uses ParamAndGradBuffer (mpu/zero) instead: flat buckets, ZeRO, sums that overlap
backward. docs/library.md has the whole program, and lists the errors that are detected.
"""

import hashlib
import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from mpu.comm.collectives import all_gather, all_reduce_in_order, gather_bytes
from mpu.comm.transport import Axis
from mpu.gradients import TOLERANCE, GradientSink, sketch
from mpu.grid import DATA, Grid
from mpu.param import PlacementError, placement_of, without_axis
from mpu.torch_private import version_of

LOOKS = 10  # maximum number of steps in which gradients of replicated weights are compared
UNSUMMED = (
    "before the gradients were summed over the ranks: call finish_grad_sync(model, grid) after the "
    "last backward of a step and before optimizer.step()"
)
STALE = (
    "a gradient would be added to the sum of the previous step: call optimizer.zero_grad() between "
    "optimizer.step() and the next backward"
)
TWICE = (
    "finish_grad_sync was called, but no gradient has been added since its last call: call it "
    "once a step, after the last backward"
)
DRAW = (
    "initialize it equally on all of them (draw_normal of mpu/param.py, or one torch.manual_seed "
    "before the model is built), or give it a Placement if it is sharded (docs/library.md)"
)
REMEDY = (
    "give the region where it is used, as in ctx.replicated(nn.LayerNorm(h), "
    "Region.SEQUENCE_PARALLEL), so that its gradient is summed (docs/library.md)"
)
Named = list[tuple[str, nn.Parameter]]


class ParamGrad(GradientSink):
    """A sink whose main gradients are `param.grad`, in the parameters' own dtype.

    A gradient is fresh if `.grad` is None, so that `optimizer.zero_grad()` starts a step. Raises
    ValueError, in one sentence, if a step would not compute the same as one process would
    (docs/library.md), for example if a torch optimizer steps before the sums.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self._drawn: set[nn.Parameter] = set()  # weights that had values at their first use
        self._added: dict[nn.Parameter, int] = {}  # parameters with new gradients; their versions
        self._sums: dict[nn.Parameter, weakref.ref[Tensor]] = {}  # of the last step
        self._hooked: set[nn.Parameter] = set()
        self._looks, self._undecided = 0, True
        hook = register_optimizer_step_pre_hook(partial(_before_step, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of NaN for a new weight, so that use before its draw is detected."""
        return torch.full(shape, math.nan, dtype=dtype, device=device)

    def acquire(self, param: nn.Parameter) -> Tensor:
        """Return the weight. Raises ValueError at its first use if it is not initialised."""
        if param not in self._drawn and not param.is_meta:
            if bool(param.detach().isnan().any()):
                raise ValueError(
                    f"{self.name_of(param)} is used before it has values: initialize "
                    "it before the first forward (draw_normal of mpu/param.py, or nn.init)"
                )
            self._drawn.add(param)
        return param

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return param.grad, allocated at first use."""
        if param.grad is None:
            param.grad = torch.zeros_like(param, requires_grad=False)
        return param.grad

    def grad_slot(self, param: nn.Parameter) -> tuple[Tensor, bool]:
        """Return (param.grad, fresh), see GradientSink."""
        self._add_to(param)
        fresh = param.grad is None
        return self.main_grad(param), fresh

    def finish_grad_sync(self, module: nn.Module, grid: Grid) -> None:
        """Sum every parameter's gradient over the ranks that have a part of it. Collective.

        These are the axes of its Placement (norms under sequence parallelism: tp) and the ranks of
        Grid.data (dp x cp). It is a sum, not a mean: divide the loss by all ranks' tokens. Call it
        once per step, after the last backward. A parameter without a gradient on any rank keeps
        none, as does a frozen one.

        Raises ValueError, on every rank, if a layer has another grid or sink, if it is called twice
        in a step, or if a gradient is sparse; in the first steps PlacementError, if ranks that hold
        the same parameter have different values of it, or gradients that differ but are not summed.
        """
        named = list[tuple[str, nn.Parameter]]()
        for name, param in module.named_parameters():
            if param.requires_grad:
                named.append((name, param))
            else:  # frozen, perhaps since the last step
                param.grad = None
                self._added.pop(param, None)
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        names = hashlib.sha256(repr([name for name, _ in named]).encode()).hexdigest()
        added = [int(self._was_added_to(param)) for _, param in named]
        mine = [grid.pp.rank, _mistake(module, self, grid, named), names, added, self._undecided]
        every = _exchange(mine, grid, device)
        stage = [each for each in every if each[0] == grid.pp.rank]
        wrong = [each[1] for each in every if each[1]]
        if not wrong and any(each[2] != names for each in stage):
            wrong = ["finish_grad_sync got models with different parameters on the ranks"]
        if not wrong and not any(1 in each[3] for each in every):
            wrong = [TWICE]
        if wrong:
            raise ValueError(wrong[0])
        anywhere = [max(each) for each in zip(*(each[3] for each in stage), strict=True)]
        named = [
            (name, param)
            for (name, param), some in zip(named, anywhere, strict=True)
            if some or placement_of(param).copies
        ]
        for _, param in named:
            self.main_grad(param)
        if self._looks < LOOKS and any(each[4] for each in every):
            self._compare(named, grid, device)
        for _, param in named:
            place, grad = placement_of(param), self.main_grad(param)
            for axis in (*place.reduce_axes, grid.data(place.axis.name).every):
                all_reduce_in_order(grad, axis)
            self._added.pop(param, None)
            self._sums[param] = weakref.ref(grad)
            if param not in self._hooked:  # for gradients that autograd adds, not a layer of mpu
                self._hooked.add(param)
                param.register_hook(partial(self._before_autograd, param))

    def _was_added_to(self, param: nn.Parameter) -> bool:
        """Return whether a gradient was added since the last sum, by a layer, autograd or user."""
        known = self._sums.get(param)
        is_sum = known is not None and known() is param.grad
        return param in self._added or (param.grad is not None and not is_sum)

    def _add_to(self, param: nn.Parameter) -> None:
        """Record that a gradient is about to be added. Raises ValueError if that is an error."""
        version = version_of(param)
        if self._added.setdefault(param, version) != version:
            raise ValueError(f"{self.name_of(param)} was changed {UNSUMMED}")
        known = self._sums.pop(param, None)
        if known is not None and param.grad is not None and known() is param.grad:
            if bool(param.grad.any()):
                raise ValueError(f"{self.name_of(param)}: {STALE}")

    def _before_autograd(self, param: nn.Parameter, grad: Tensor | None) -> None:
        if grad is not None:
            self._add_to(param)

    def _compare(self, named: Named, grid: Grid, device: torch.device) -> None:
        """Compare the ranks' replicas of parameters and of gradients. Collective.

        Raises PlacementError, on every rank, if values differ (checked at the first call), or
        gradients that should agree (see the table of mpu/zero/gradient_check.py).
        """
        errors, twice, self._undecided, self._looks = list[str](), "", False, self._looks + 1
        for cut in DATA:
            axes = grid.data(cut)
            held = [each for each in named if placement_of(each[1]).axis.name == cut]
            whole = [each for each in held if placement_of(each[1]).dim is None]
            if self._looks == 1:
                for axis, some in ((axes.cut, whole), (axes.every, held)):
                    for name, param, far, norm in _apart(some, axis, lambda p: p):
                        if far > _tolerance(param) * norm:
                            where = f"differ among the ranks of {axis.name}, which all hold it"
                            errors.append(f"{name}: its values {where}: {DRAW}")
            for name, param, far, norm in _apart(whole, axes.cut, self.main_grad):
                if not 0 < norm < math.inf:
                    self._undecided = True
                    continue
                partial_sum = cut in (axis.name for axis in placement_of(param).reduce_axes)
                differ = far > _tolerance(param) * norm
                if differ and not partial_sum:
                    errors.append(
                        f"{name}: its gradient differs among the ranks of {cut}, though it should "
                        f"be the same on each of them: {REMEDY}"
                    )
                elif partial_sum and not differ:
                    twice = twice or name
        wrong = [found for found in _exchange(errors[:1], grid, device) if found]
        if wrong:
            raise PlacementError(wrong[0][0])
        if twice and self._looks == 1 and grid.rank == 0:
            warnings.warn(
                f"{twice}: its gradients are summed over ranks that all have the same ones; if "
                "they were summed before, this counts them twice (docs/library.md)",
                stacklevel=3,
            )


def _before_step(sink: "weakref.ref[ParamGrad]", optimizer: Optimizer, *args: Any) -> None:
    """Raise ValueError if an optimizer would step with gradients that are not summed yet."""
    added = {} if (alive := sink()) is None else alive._added
    if added and any(
        param in added for group in optimizer.param_groups for param in group["params"]
    ):
        raise ValueError(f"the optimizer would step {UNSUMMED}")


def _mistake(module: nn.Module, sink: ParamGrad, grid: Grid, named: Named) -> str:
    """Return a message about an error in a model on this rank, or ""."""
    for name, part in module.named_modules():
        ctx, what = getattr(part, "ctx", None), f"{name or type(part).__name__} was built with a"
        if getattr(ctx, "sink", sink) is not sink:
            return f"{what}nother sink: make its LayerContext with sink= this ParamGrad"
        if getattr(ctx, "grid", grid) is not grid:
            return f"{what}nother grid than finish_grad_sync was given: use one for both"
    for name, param in named:
        if param.grad is not None and param.grad.layout != torch.strided:
            return f"{name} has a sparse gradient, which cannot be summed: omit sparse=True"
        if why := without_axis(name, param, grid.world_size, grid.ep_size):
            return why
    return ""


def _apart(
    named: Named, axis: Axis, of: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[str, nn.Parameter, float, float]]:
    """Yield (name, parameter, distance between the ranks' tensors, their largest norm)."""
    if axis.size == 1 or not named:
        return
    own = torch.stack([sketch(of(param).detach()) for _, param in named])
    every = all_gather(own[None], axis)[0]
    far = (every[..., :-1] - own[:, :-1]).norm(dim=-1).amax(0)
    largest = every[..., -1].amax(0)
    for (name, param), distance, norm in zip(named, far.tolist(), largest.tolist(), strict=True):
        yield name, param, distance, norm


def _tolerance(param: nn.Parameter) -> float:
    return TOLERANCE.get(param.dtype, TOLERANCE[torch.float32])


def _exchange(mine: list[Any], grid: Grid, device: torch.device) -> list[Any]:
    """Return every rank's list."""
    return [
        json.loads(text) for text in gather_bytes(json.dumps(mine).encode(), grid.world, device)
    ]
