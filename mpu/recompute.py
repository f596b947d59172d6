# SPDX-License-Identifier: Apache-2.0
"""Activation recomputation (Chen et al. 2016): keep a function's inputs, rerun it in backward.

`full` wraps whole blocks, `selective` only core attention, whose activations are large and cheap
to recompute (Korthikanti et al. 2022). Nothing here draws random numbers, so there is no generator
state to restore. Decisions that depend on values, such as the experts of a token, are made once:
`Decisions` replays them in the second run.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpu.activation_offload import Offload

Blocks = Sequence[Callable[..., Tensor]]
Decision = TypeVar("Decision")


class Decisions(threading.local):
    """Records the decisions of layers in the first run of recomputed blocks, in order.

    At most one list is written or read at a time in a thread, as recomputed units are not nested.
    Two interleaved micro-batches have two threads.
    """

    def __init__(self) -> None:
        self._made: list[Any] | None = None  # decisions of the unit in its first run
        self._again: Iterator[Any] | None = None  # its recorded decisions, in the second run

    def first(self, run: Callable[..., Tensor], *inputs: Any) -> tuple[Tensor, list[Any]]:
        """Return run(*inputs) and the decisions of its layers."""
        made: list[Any] = []
        self._made = made
        try:
            return run(*inputs), made
        finally:
            self._made = None

    def second(self, made: Sequence[Any], run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return run(*inputs), in which the layers reuse the decisions `made`."""
        self._again = iter(made)
        try:
            return run(*inputs)
        finally:
            self._again = None

    def record(self, decide: Callable[[], Decision]) -> Decision:
        """Return decide() or, in a second run, its result in the first run."""
        if self._again is not None:
            recorded: Decision = next(self._again)
            return recorded
        decision = decide()
        if self._made is not None:
            self._made.append(decision)
        return decision


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        saved_ctx: Any,
        decisions: Decisions,
        run: Callable[..., Tensor],
        weight: nn.Parameter | None,
        *inputs: Any,
    ) -> Tensor:
        saved_ctx.decisions, saved_ctx.run = decisions, run
        saved_ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        saved_ctx.others = [
            None if t else x for x, t in zip(inputs, saved_ctx.is_tensor, strict=True)
        ]
        saved_ctx.save_for_backward(*[x for x in inputs if isinstance(x, Tensor)])
        with torch.no_grad():
            y, saved_ctx.made = decisions.first(run, *inputs)
        return y

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        saved = iter(saved_ctx.saved_tensors)
        inputs = []
        for is_tensor, other, needs in zip(
            saved_ctx.is_tensor, saved_ctx.others, saved_ctx.needs_input_grad[3:], strict=True
        ):
            inputs.append(next(saved).detach().requires_grad_(needs) if is_tensor else other)
        with torch.enable_grad():
            y = saved_ctx.decisions.second(saved_ctx.made, saved_ctx.run, *inputs)
        torch.autograd.backward(y, dy)
        grads = [x.grad if isinstance(x, Tensor) else None for x in inputs]
        return None, None, None, *grads


def recompute(
    run: Callable[..., Tensor],
    *inputs: Any,
    decisions: Decisions | None = None,
    layers: Sequence[Any] = (),
    **options: Any,
) -> Tensor:
    """Return run(*inputs, **options), keeping only its arguments for backward, which reruns it.

    decisions: those of the layers in `run`, which are kept too. Parameters inside add their
    gradients to the sink. layers: the modules in `run`; without them, nothing inside gets a
    gradient unless a tensor input requires one. If nothing trains, nothing is kept.
    """
    tensors = {name: x for name, x in options.items() if isinstance(x, Tensor)}
    rest = {name: x for name, x in options.items() if name not in tensors}
    run = partial(run, **rest) if rest else run
    if tensors:  # inputs like the others, which get their gradients
        run = partial(_by_name, run, tuple(tensors))
        inputs = (*inputs, *tensors.values())
    weight = None
    if not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        weights = (p for layer in layers for p in getattr(layer, "parameters", tuple)())
        weight = next((p for p in weights if p.requires_grad), None)
        if weight is None:
            return run(*inputs)
    if not torch.is_grad_enabled():
        return run(*inputs)
    return _Recompute.apply(decisions or Decisions(), run, weight, *inputs)


def _by_name(run: Callable[..., Tensor], names: tuple[str, ...], *inputs: Any) -> Tensor:
    """Call `run` with the last inputs as keyword arguments of these names."""
    first = len(inputs) - len(names)
    return run(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


class Recompute:
    """Decide what to recompute: Megatron's --recompute-granularity, -method and -num-layers.

    full + uniform: groups of `num_layers` blocks, each group keeps only its first input.
    full + block: the first `num_layers` blocks one by one, the others keep everything.
    selective: core attention of every block.
    offload: keep the blocks' saved tensors (their inputs, under full) in host memory.
    """

    def __init__(
        self,
        granularity: str | None = None,
        method: str | None = None,
        num_layers: int = 1,
        offload: Offload | None = None,
    ) -> None:
        if granularity not in (None, "full", "selective"):
            raise ValueError(
                f"--recompute-granularity {granularity}: must be 'full' or 'selective'"
            )
        self.granularity, self.method, self.num_layers = granularity, method, num_layers
        self.offload = offload
        self.decisions = Decisions()
        # whether a model must run its blocks through `blocks`, instead of one after another
        self.runs_blocks = granularity == "full" or offload is not None

    def selective(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `run` (core attention), recomputed in backward if the granularity is selective."""
        return partial(recompute, run) if self.granularity == "selective" else run

    def blocks(self, layers: Blocks, h: Tensor, *shared: Any) -> Tensor:
        """Run blocks one after another, h = layer(h, *shared), recomputing according to the method.

        Their saved tensors are kept in host memory if `offload` is set.
        """
        group = self.num_layers if self.method == "uniform" else 1
        units = []
        for first in range(0, len(layers), group):
            some = layers[first : first + group]
            full = self.granularity == "full" and (
                self.method != "block" or first < self.num_layers
            )
            run = self.sequential(some)
            again = partial(recompute, run, decisions=self.decisions, layers=some)
            units.append((some, again if full else run))
        if self.offload is not None:
            return self.offload.run(units, h, *shared)
        for _, each in units:
            h = each(h, *shared)
        return h

    def sequential(self, layers: Blocks) -> Callable[..., Tensor]:
        """Return a function that runs layers one after another."""

        def run(h: Tensor, *shared: Any) -> Tensor:
            for layer in layers:
                h = layer(h, *shared)
            return h

        return run
