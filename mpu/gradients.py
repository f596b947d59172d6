# SPDX-License-Identifier: Apache-2.0
"""The sink to which layers add weight gradients, and the queue that may defer their computation.

A layer never touches `.grad`. In backward it adds its weight gradient to a GradientSink, which
handles buckets, micro-batches and data-parallel ranks (implemented in mpu/zero). A pipeline may
keep the computation of weight gradients in the WeightGradientQueue and run it later.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# allowed difference, relative to the norm, of gradients that should agree (docs/numerics.md)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
WIDTH, PART = 64, 1 << 20  # size of a sketch; elements sketched at a time, a multiple of WIDTH


class StepState:
    """State besides gradients that layers record during a step, and its processing at the end.

    Examples are the amaxes of delayed float8 (mpu/layers/float8/delayed.py), the tokens of each
    expert (mpu/layers/expert_load.py) and the largest attention logits (mpu/layers/attention/
    max_logits.py). All ranks that share a layer have the same step states, in the same order.
    """

    def begin_step(self) -> None:
        """Discard everything recorded since the last step."""

    def end_step(self, found_inf: Tensor) -> None:
        """Reduce over ranks, before the update. found_inf: 1.0 if the update is skipped."""

    def row_factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (weight, factor of each row): factors to multiply rows by after the update."""
        yield from ()

    def loaded(self) -> None:
        """Resume after a checkpoint was loaded into this state."""


S = TypeVar("S", bound=StepState)


class GradientSink:
    """The object to which layers add weight gradients: one main gradient per parameter.

    This base class keeps each in a separate tensor, without any other ranks. ParamAndGradBuffer
    (mpu/zero) keeps them in flat buckets and sums the buckets over ranks.

    watched: whether a ModuleTracker reads the activations and gradients between layers, so that
    each must exist as a tensor.
    """

    watched = False

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.main: dict[nn.Parameter, Tensor] = {}
        self.written: set[nn.Parameter] = set()
        self.step_states: list[StepState] = []
        # float8 rows of weights, which micro-batches share, by the weight and its role
        self.weight_rows: dict[tuple[nn.Parameter, str], Tensor] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor for a new weight; at ZeRO stage 3 it has no memory yet."""
        return torch.empty(shape, dtype=dtype, device=device)

    def acquire(self, param: nn.Parameter) -> Tensor:
        """Return the whole local weight; at ZeRO stage 3 it is gathered here."""
        return param

    def is_sharded(self, param: nn.Parameter) -> bool:
        """Return whether the weight is unsharded only between `acquire` and `end_use`."""
        return False

    def end_use(self, param: nn.Parameter) -> None:
        """End a use of the weight, which ZeRO stage 3 may then free."""

    def begin_step(self, micro_batches: int = 1) -> None:
        """Start a step: a parameter's first gradient overwrites that of the previous step."""
        self.written.clear()
        self.weight_rows.clear()
        for state in self.step_states:
            state.begin_step()

    def state_of(self, kind: type[S]) -> S | None:
        """Return the step state of a class, or None if no layer has registered one."""
        return next((state for state in self.step_states if isinstance(state, kind)), None)

    def name_of(self, param: nn.Parameter) -> str:
        """Return a description of a parameter for messages: here only its shape."""
        return f"a weight of shape {list(param.shape)}"

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return the parameter's main gradient, allocated at first use."""
        if param not in self.main:
            self.main[param] = torch.empty(param.shape, dtype=self.dtype, device=param.device)
        return self.main[param]

    def grad_slot(self, param: nn.Parameter) -> tuple[Tensor, bool]:
        """Return (main gradient, fresh) for a caller that is about to add a gradient.

        fresh: nothing was written in this step yet, so the caller must overwrite instead of adding.
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
        """Record that one use of the parameter has added its gradient of one micro-batch."""


class _Use(torch.autograd.Function):
    """Identity in forward; backward adds the gradient to the sink instead of `.grad`."""

    @staticmethod
    def forward(saved_ctx: Any, param: nn.Parameter, sink: GradientSink) -> Tensor:
        saved_ctx.param, saved_ctx.sink = param, sink
        full_weight = sink.acquire(param)
        # autograd may save the tensor, so a weight that may be freed is copied
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

    For new layers of a fork. At ZeRO stage 3 the result is a copy.
    """
    return _Use.apply(param, sink)


class WeightGradientQueue:
    """Runs the computation of weight gradients at once, or defers it until the pipeline runs it.

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
        """Return a function that calls `put`, to be called from another layer's backward."""
        return lambda: self.put(work, tensors)

    def defers(self, output_layer: bool = False) -> bool:
        """Return whether work, of the output layer or of another one, is deferred at the moment."""
        return self._pending is not None and (self._all or output_layer)

    def defer(self, output_layer_only: bool = False) -> None:
        """Defer work from now on, of all layers or only of the output layer."""
        assert self._pending is None, "another backward is deferring its work"
        self._pending, self._all = deque(), not output_layer_only

    def take(self) -> "deque[Callable[[], None]]":
        """Stop deferring, and return the pending work, oldest first."""
        assert self._pending is not None, "defer() was not called"
        pending, self._pending = self._pending, None
        return pending


@torch.no_grad()  # as in backward
def run_deferred(works: "deque[Callable[[], None]]") -> None:
    """Run deferred work, oldest first, and free the references of each as soon as it is done."""
    while works:
        works.popleft()()


def sketch(gradient: Tensor) -> Tensor:
    """Return WIDTH + 1 numbers in fp64 from which the norm of a difference can be estimated.

    Element i is added, with a random sign, to number i mod WIDTH: the distance of two sketches is
    on average that of the gradients. The signs are the same on every rank. The last number is the
    norm.
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
