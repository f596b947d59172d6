# SPDX-License-Identifier: Apache-2.0
"""Where layers put the gradients of their weights, and when these are computed.

A layer never touches `.grad`. In backward it hands its weight gradient to a GradientSink, which
knows the buckets, the micro-batches and the data-parallel ranks (mpu/zero implements it). A
pipeline may keep weight gradients in the WeightGradientQueue and run them later.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class GradientSink:
    """Where layers put weight gradients: one main gradient a parameter, in the accumulation dtype.

    This base class keeps each in a tensor of its own and knows nothing of other ranks;
    mpu/zero/param_and_grad_buffer.py keeps them in flat buckets and reduces a bucket when its last
    gradient of the step is done.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.main: dict[nn.Parameter, Tensor] = {}
        self._written: set[nn.Parameter] = set()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what a new weight lies in; ZeRO level 3 gives it no memory yet."""
        return torch.empty(shape, dtype=dtype, device=device)

    def acquire(self, param: nn.Parameter) -> Tensor:
        """Return the whole local weight; a sharding sink gathers it here (ZeRO level 3)."""
        return param

    def is_sharded(self, param: nn.Parameter) -> bool:
        """Say whether the weight is whole only between `acquire` and `end_use`."""
        return False

    def end_use(self, param: nn.Parameter) -> None:
        """Say that the weight is not needed for now (ZeRO level 3 frees it)."""

    def begin_step(self, micro_batches: int = 1) -> None:
        """Forget the old gradients: the step's first contribution overwrites, no zeroing pass."""
        self._written.clear()

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return the parameter's main gradient, allocated at first use."""
        if param not in self.main:
            self.main[param] = torch.empty(param.shape, dtype=self.dtype, device=param.device)
        return self.main[param]

    def grad_slot(self, param: nn.Parameter) -> tuple[Tensor, bool]:
        """Return the main gradient that the caller is about to add to, and whether it is fresh:
        then nothing has been written to it in this step, and the caller overwrites it.
        """
        fresh = param not in self._written
        self._written.add(param)
        return self.main_grad(param), fresh

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """Add a ready gradient."""
        main, fresh = self.grad_slot(param)
        main.copy_(grad) if fresh else main.add_(grad)

    def add_rows(self, param: nn.Parameter, rows: Tensor, grad: Tensor) -> None:
        """Add grad[i] to row rows[i]: rows [n], grad [n, h]."""
        main, fresh = self.grad_slot(param)
        if fresh:
            main.zero_()
        main.index_add_(0, rows, grad.to(main.dtype))

    def register_grad_ready(self, param: nn.Parameter) -> None:
        """Say that this use of the parameter has given all its gradient of one micro-batch."""


class _Use(torch.autograd.Function):
    """Identity forward; backward hands the gradient to the sink instead of `.grad`."""

    @staticmethod
    def forward(saved_ctx: Any, param: nn.Parameter, sink: GradientSink) -> Tensor:
        saved_ctx.param, saved_ctx.sink = param, sink
        whole = sink.acquire(param)
        # autograd may keep what it is given: a weight that comes and goes is copied
        given = whole.clone() if sink.is_sharded(param) else whole.view_as(param)
        sink.end_use(param)
        return given

    @staticmethod
    def backward(saved_ctx: Any, grad: Tensor) -> tuple[None, None]:
        saved_ctx.sink.add(saved_ctx.param, grad)
        saved_ctx.sink.register_grad_ready(saved_ctx.param)
        return None, None


def use(param: nn.Parameter, sink: GradientSink) -> Tensor:
    """Use a parameter in ordinary autograd code: its gradient goes to the sink. For new layers in a
    fork. At ZeRO level 3 what it returns is a copy.
    """
    return _Use.apply(param, sink)


class WeightGradientQueue:
    """Run weight gradients at once, or keep those of a backward until the pipeline engine says W.

    The engine runs the W's of a stage in the order of the micro-batches, so deferring changes no
    bit.
    """

    def __init__(self) -> None:
        self._kept: deque[Callable[[], None]] | None = None

    def put(self, work: Callable[[], None], kept: Sequence[Tensor] = ()) -> None:
        """Run one weight gradient, or keep it. kept: the tensors that live until it has run."""
        if self._kept is None:
            work()
        else:
            self._kept.append(work)

    @property
    def deferring(self) -> bool:
        """True between `defer()` and `take()`."""
        return self._kept is not None

    def defer(self) -> None:
        """Keep what is put from now on."""
        assert self._kept is None, "one backward at a time defers"
        self._kept = deque()

    def take(self) -> "deque[Callable[[], None]]":
        """Stop keeping, and hand over what was kept, oldest first."""
        assert self._kept is not None, "nothing was deferred"
        kept, self._kept = self._kept, None
        return kept


@torch.no_grad()  # as in backward
def run_deferred(works: "deque[Callable[[], None]]") -> None:
    """Run weight gradients that were kept, and free what each held as soon as it is done."""
    while works:
        works.popleft()()
