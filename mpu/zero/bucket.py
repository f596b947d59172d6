# SPDX-License-Identifier: Apache-2.0
"""One bucket: the flat weights and gradients of some parameters, and their state during a step.

A ParamBucket has only weights, as for frozen parameters; a ParamAndGradBucket adds the gradients:

    begin_step             no gradient is written; set the number of expected gradients
    open_grad              allocate the main gradients (from stage 2 on they are freed again)
    register_grad_ready    one use has added its gradient; is_ready: all have
    start_grad_sync        no more gradients are written; start the first collective of the sum
    wait_and_start_next    wait for the first, start the second, ... (mpu/zero/reduce.py)
    wait                   grad_shard holds the sum

From ZeRO stage 1 on each rank owns an equal part [low, high) of every bucket. A rank keeps:

    0   all weights and gradients; every rank gets every sum and updates everything
    1   the same; a sum arrives at its owner, which updates its part; then weights are gathered
    2   all weights, the sums it owns, and a buffer from a bucket's first gradient to its sum
    3   as 2, but only its part of the weights; each block is gathered for use (mpu/zero/gather.py)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mpu.comm.transport import DONE, Axis, Handle, Label
from mpu.zero.bucket_layout import BucketLayout, gaps
from mpu.zero.reduce import Reduction, sum_over_data, sum_over_extra_axes


class BucketState(Protocol):
    """A bucket's offloaded optimizer state (mpu/optim/state_offload.py)."""

    def fetch(self) -> None: ...
    def leave(self) -> None: ...


@dataclass
class LiveBytes:
    """Bytes of the unsharded gradients that are allocated during a step: now, and at the peak."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Count allocated memory or, if nbytes is negative, freed memory."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)


class ParamBucket:
    """The flat weights of some parameters, in their own dtype.

    params: parameters by name. shared: the ranks that share it; None if this rank owns all of it.
    """

    def __init__(
        self, layout: BucketLayout, params: Mapping[str, nn.Parameter], shared: Axis | None
    ) -> None:
        self.layout, self.shard = layout, shared
        self.params = [(name, params[name], offset) for name, offset, _ in layout.params]
        self.has_matrix = any(param.dim() > 1 for _, param, _ in self.params)
        self.low = self.shard.rank * layout.own if self.shard else 0  # this rank owns [low, high)
        self.high = self.low + layout.own
        self.block: Sequence[ParamBucket] = (self,)  # at stage 3: buckets gathered together
        self.state: BucketState | None = None  # set if it is in host memory between steps
        self.weights: Tensor | None = None  # all of them, while they are unsharded
        self.gathering: Handle = DONE  # the gather of the weights
        self.users = 0  # sharded: the number of uses that have not ended
        self.waiting = 0  # gradients that are still missing before the next sum
        _, first, _ = self.params[0]
        if self.sharded:
            self.param_shard = first.new_zeros(self.high - self.low, requires_grad=False)
        else:
            weights = first.new_zeros(self.length, requires_grad=False)
            self.view_params_in(weights, copy=True)
            self.param_shard = weights[self.low : self.high]

    @property
    def length(self) -> int:
        """Return the number of its elements, including padding."""
        return self.layout.length

    @property
    def sharded(self) -> bool:
        """Return whether a rank keeps only its share of the weights."""
        return self.layout.sharded

    def view_params_in(self, flat: Tensor, copy: bool = False) -> None:
        """Make the parameters views of `flat`; copy: keep their values."""
        self.weights = flat
        for _, param, start in self.params:
            home = flat[start : start + param.numel()].view(param.shape)
            if copy:
                home.copy_(param.data)
            param.data = home

    def owned(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (name, low, high, offset) for each parameter of which this rank owns elements.

        It owns elements [low, high) of the bucket; the parameter begins at `offset`.
        """
        for name, param, start in self.params:
            low, high = max(start, self.low), min(start + param.numel(), self.high)
            if low < high:
                yield name, low, high, start


class ParamAndGradBucket(ParamBucket):
    """The flat weights and gradients of some parameters, and the progress of the gradients' sum.

    uses: number of gradients of its parameters per micro-batch. reduction, reduce_axes: the ranks
    over which their gradients are summed. main: the main gradients to which layers add
    (GradientSink.main); only open buckets have entries. live: counts the bytes of unsharded
    gradients, from stage 2 on.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Mapping[str, nn.Parameter],
        uses: int,
        reduction: Reduction,
        reduce_axes: tuple[Axis, ...],
        main: dict[nn.Parameter, Tensor],
        live: LiveBytes,
    ) -> None:
        super().__init__(layout, params, reduction.shard if reduction.zero_stage else None)
        self.uses, self.reduction, self.reduce_axes = uses, reduction, reduce_axes
        self._main, self._live = main, live
        self.rounds = 0  # sums that have not started yet in this step
        self.plain = False  # a weight of it is used in plain autograd, without the sink
        self._summed = False  # grad_shard holds the sum of an earlier micro-batch
        self._steps: Iterator[Handle] = iter(())  # the collectives of its sum
        self._handle: Handle | None = None  # the collective in flight
        self._leaving = 0  # bytes of unsharded gradients that are freed after it
        device, how = self.param_shard.device, reduction
        self.grad: Tensor | None = None  # this rank's own sum over micro-batches, while it exists
        if how.zero_stage < 2:
            self.grad = torch.zeros(self.length, dtype=how.main_dtype, device=device)
        if self.grad is not None and how.main_dtype == how.dtype:
            self.grad_shard = self.grad[self.low : self.high]  # the sum of [low, high)
        else:
            self.grad_shard = torch.zeros(self.high - self.low, dtype=how.dtype, device=device)
        if self.grad is not None:
            self.open_grad()

    def begin_step(self, micro_batches: int, each: bool) -> None:
        """Start a step; each: buckets are summed after every micro-batch, else after the last.

        Buckets that are summed over extra axes, or below stage 2, are always summed once per step.
        """
        each = each and not self.reduce_axes and self.reduction.zero_stage >= 2
        self.rounds = micro_batches if each else 1
        self.waiting = self.uses * (1 if each else micro_batches)
        self._summed = False

    def open_grad(self) -> None:
        """Publish the bucket's main gradients to layers; allocate them if they have no memory."""
        if self.grad is None:
            grad = self.param_shard.new_empty(self.length, dtype=self.reduction.main_dtype)
            for low, high in gaps(self.layout):
                grad[low:high].zero_()
            self._live.add(grad.nbytes)
            self.grad = grad
        for _, param, start in self.params:
            self._main[param] = self.grad[start : start + param.numel()].view(param.shape)

    def _close_grad(self) -> Tensor:
        """Return the gradients; from stage 2 on layers can no longer access them."""
        grad = self.grad
        assert grad is not None
        if self.reduction.zero_stage >= 2:
            self.grad, self._leaving = None, grad.nbytes
            for _, param, _ in self.params:
                del self._main[param]
        return grad

    def register_grad_ready(self) -> None:
        """Count one use of a parameter whose gradient of one micro-batch is complete."""
        assert self.rounds, "a parameter gave a gradient after its bucket was sent"
        self.waiting -= 1
        if self.state is not None and not self.waiting and self.rounds == 1:
            self.state.fetch()

    @property
    def is_ready(self) -> bool:
        """Return whether no gradient is missing and the sum may start during backward."""
        return not self.waiting and not self.reduce_axes

    def start_grad_sync(self) -> None:
        """Start the sum of the gradients, once the sum of an earlier micro-batch is complete."""
        self.wait()
        self.rounds -= 1
        grad, label = self._close_grad(), Label(self, "grad sum")
        sum_over_extra_axes(grad, self.reduce_axes, label)
        self._steps = sum_over_data(
            grad,
            self.grad_shard,
            self.reduction,
            label,
            earlier=self._summed,
            last=not self.rounds,
        )
        self._handle = next(self._steps)  # starts the reduce-scatter (sum_over_data)
        self._summed = True
        if self.rounds:
            self.waiting = self.uses

    def wait_and_start_next(self) -> None:
        """Wait for the collective in flight, if any, and start the next one, if any."""
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = next(self._steps, None)
        if self._leaving:
            self._live.add(-self._leaving)
            self._leaving = 0

    def wait(self) -> None:
        """Wait until the sum is complete, in grad_shard."""
        while self._handle is not None:
            self.wait_and_start_next()
