# SPDX-License-Identifier: Apache-2.0
"""Where layers put the gradients of their weights, and when these are computed.

A layer never touches `.grad`. In backward it hands its weight gradient to a GradientSink, which
knows the buckets, the micro-batches and the data-parallel ranks (mpu/zero implements it). A
pipeline may keep the work of weight gradients in the WeightGradientQueue and run it later.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# by how much of the norm gradients of ranks that do the same may differ (docs/numerics.md)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
WIDTH, PART = 64, 1 << 20  # numbers of a sketch; elements sketched at a time, a multiple of WIDTH


class StepState:
    """What layers note during a step besides gradients, and what follows from it at its end.

    The amaxes of delayed float8 (mpu/layers/float8/delayed.py), the tokens of each expert
    (mpu/layers/expert_load.py) and the largest attention logits (mpu/layers/attention/
    max_logits.py) are some. All ranks that share a layer have the same, in the same order.
    """

    def begin_step(self) -> None:
        """Forget what was noted since the last step."""

    def end_step(self, found_inf: Tensor) -> None:
        """Agree with other ranks, before the update. found_inf: 1.0 where that is skipped."""

    def row_factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield what multiplies rows of weights after the update: (weight, factor of each row)."""
        yield from ()

    def loaded(self) -> None:
        """Go on from what a checkpoint was read into."""


S = TypeVar("S", bound=StepState)


class GradientSink:
    """Where layers put weight gradients: one main gradient a parameter.

    This base class keeps each in a tensor of its own and knows nothing of other ranks.
    ParamAndGradBuffer (mpu/zero) keeps them in flat buckets and sums the buckets over ranks.

    watched: whether somebody reads the activations and gradients between layers (ModuleTracker), so
    that each must be made as a tensor.
    """

    watched = False

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.main: dict[nn.Parameter, Tensor] = {}
        self.written: set[nn.Parameter] = set()
        self.step_states: list[StepState] = []
        # rows of float8 of weights that micro-batches share, by the weight and its role
        self.weight_rows: dict[tuple[nn.Parameter, str], Tensor] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an unset tensor for a new weight; at ZeRO stage 3 it has no memory yet."""
        return torch.empty(shape, dtype=dtype, device=device)

    def acquire(self, param: nn.Parameter) -> Tensor:
        """Return the whole local weight; at ZeRO stage 3 it is gathered here."""
        return param

    def is_sharded(self, param: nn.Parameter) -> bool:
        """Return whether the weight is whole only between `acquire` and `end_use`."""
        return False

    def end_use(self, param: nn.Parameter) -> None:
        """Note that the weight is not needed for now: ZeRO stage 3 may free it."""

    def begin_step(self, micro_batches: int = 1) -> None:
        """Start a step: the first gradient of a parameter overwrites what an earlier step left."""
        self.written.clear()
        self.weight_rows.clear()
        for state in self.step_states:
            state.begin_step()

    def state_of(self, kind: type[S]) -> S | None:
        """Return the step state of a kind, None where layers note nothing of it."""
        return next((state for state in self.step_states if isinstance(state, kind)), None)

    def name_of(self, param: nn.Parameter) -> str:
        """Return a parameter's name and its module's type for a message: here its shape alone."""
        return f"a weight of shape {list(param.shape)}"

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return the parameter's main gradient, allocated at first use."""
        if param not in self.main:
            self.main[param] = torch.empty(param.shape, dtype=self.dtype, device=param.device)
        return self.main[param]

    def grad_slot(self, param: nn.Parameter) -> tuple[Tensor, bool]:
        """Return (main gradient, fresh) to a caller that is about to add a gradient.

        fresh: nothing has been written in this step, so the caller overwrites instead of adding.
        """
        fresh = param not in self.written
        self.written.add(param)
        return self.main_grad(param), fresh

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """Add a gradient of the whole local weight."""
        main, fresh = self.grad_slot(param)
        main.copy_(grad) if fresh else main.add_(grad)

    def add_rows(self, param: nn.Parameter, rows: Tensor, grad: Tensor) -> None:
        """Add grad[i] to row rows[i]: rows [n], grad [n, h]."""
        main, fresh = self.grad_slot(param)
        if fresh:
            main.zero_()
        main.index_add_(0, rows, grad.to(main.dtype))

    def register_grad_ready(self, param: nn.Parameter) -> None:
        """Note that one use of the parameter has added its gradient of one micro-batch."""


class _Use(torch.autograd.Function):
    """Identity forward; backward hands the gradient to the sink instead of `.grad`."""

    @staticmethod
    def forward(saved_ctx: Any, param: nn.Parameter, sink: GradientSink) -> Tensor:
        saved_ctx.param, saved_ctx.sink = param, sink
        full_weight = sink.acquire(param)
        # autograd may keep what it is given, so a weight that may be freed is copied
        given = full_weight.clone() if sink.is_sharded(param) else full_weight.view_as(param)
        sink.end_use(param)
        return given

    @staticmethod
    def backward(saved_ctx: Any, grad: Tensor) -> tuple[None, None]:
        saved_ctx.sink.add(saved_ctx.param, grad)
        saved_ctx.sink.register_grad_ready(saved_ctx.param)
        return None, None


def use(param: nn.Parameter, sink: GradientSink) -> Tensor:
    """Return a parameter for ordinary autograd code; its gradient goes to the sink.

    New layers of a fork use it. At ZeRO stage 3 the result is a copy.
    """
    return _Use.apply(param, sink)


class WeightGradientQueue:
    """Compute weight gradients at once, or defer a backward's work until the pipeline runs it.

    The engine runs a stage's W's in the order of the micro-batches, so deferring changes no bit.
    """

    def __init__(self) -> None:
        self._pending: deque[Callable[[], None]] | None = None
        self._all = True

    def put(
        self, work: Callable[[], None], tensors: Sequence[Tensor] = (), output_layer: bool = False
    ) -> None:
        """Run the work of one weight gradient, or defer it. tensors: its references."""
        if self.defers(output_layer):
            assert self._pending is not None
            self._pending.append(work)
        else:
            work()

    def later(self, work: Callable[[], None], tensors: Sequence[Tensor] = ()) -> Callable[[], None]:
        """Return what puts the work of a layer, for another layer's backward to call."""
        return lambda: self.put(work, tensors)

    def defers(self, output_layer: bool = False) -> bool:
        """Return whether the work of a layer, the output layer or another, is deferred now."""
        return self._pending is not None and (self._all or output_layer)

    def defer(self, output_layer_only: bool = False) -> None:
        """Defer the work that is put from now on, of all layers or of the output layer."""
        assert self._pending is None, "another backward is deferring its work"
        self._pending, self._all = deque(), not output_layer_only

    def take(self) -> "deque[Callable[[], None]]":
        """Stop deferring, and return the pending work, oldest first."""
        assert self._pending is not None, "defer() was not called"
        pending, self._pending = self._pending, None
        return pending


@torch.no_grad()  # as in backward
def run_deferred(works: "deque[Callable[[], None]]") -> None:
    """Run deferred work, oldest first, and free what each piece references as soon as it is done.
    """
    while works:
        works.popleft()()


def sketch(gradient: Tensor) -> Tensor:
    """Return WIDTH + 1 numbers in fp64 from which the norm of a difference can be estimated.

    Element i is added, with a random sign, to number i mod WIDTH: the sketches of two gradients are
    as far apart as the gradients, on average. The signs are the same on every rank. The last number
    is the norm.
    """
    flat, device = gradient.flatten(), gradient.device
    out = torch.zeros(WIDTH + 1, dtype=torch.float64, device=device)
    generator = torch.Generator(device)
    for first in range(0, len(flat), PART):
        part = flat[first : first + PART].double()
        generator.manual_seed(first)
        signs = torch.randint(0, 2, part.shape, generator=generator, device=device).mul_(2).sub_(1)
        out[-1] += part.square().sum()
        signed = nn.functional.pad(part * signs, (0, -len(part) % WIDTH))
        out[:-1] += signed.view(-1, WIDTH).sum(0)
    out[-1].sqrt_()
    return out
