# SPDX-License-Identifier: Apache-2.0
"""Keep gradients in flat buckets, and sum a bucket over the data-parallel ranks as soon as it is
complete.

Parameters stand in reverse definition order, which is about the order in which backward finishes
them, so bucket 0 is complete first. Each parameter starts at a multiple of BLOCK elements, the unit
of the global norm and the grain at which a bucket may be cut among ranks. Parameters whose gradient
must also be summed over another axis (norms under sequence parallelism) share the last bucket, so
that this takes one collective for all of them.

    last backward    ... done(p) done(p) | bucket 0 leaves | done(p) ... | bucket 1 leaves | ...
    finish()         wait for all, then sum the last bucket over its extra axis
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpu.comm.collectives import (
    DONE,
    Handle,
    all_gather,
    all_reduce,
    all_reduce_in_order,
    reduce_scatter,
)
from mpu.grid import Axis
from mpu.param import GradientSink, placement_of

BLOCK = 1024


@dataclass
class Bucket:
    """A flat gradient tensor, its parameters with their offsets, and how far its sum has come."""

    params: list[tuple[str, nn.Parameter, int]]
    grad: Tensor
    reduce_axes: tuple[Axis, ...] = ()
    waiting: int = 0  # uses of its parameters not yet done in this micro-batch
    launched: bool = False
    shard: Tensor | None = None
    handle: Handle = field(default=DONE)


class GradientBuckets(GradientSink):
    """The gradient sink of a training run: level 0, gradients replicated and all-reduced.

    data: the axis gradients are summed over. bucket_size: elements a bucket, about; 0 chooses.
    overlap: let a bucket leave during backward; else all leave at `finish`. The bits do not depend
    on either.
    """

    def __init__(
        self,
        data: Axis,
        dtype: torch.dtype = torch.float32,
        bucket_size: int = 0,
        overlap: bool = True,
    ) -> None:
        super().__init__(dtype)
        self.data, self.bucket_size, self.overlap = data, bucket_size, overlap
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._uses: dict[nn.Parameter, int] = {}
        self._last, self._next = False, 0

    def attach(self, module: nn.Module) -> None:
        """Build the buckets for a module's parameters; a tied parameter counts each of its uses."""
        for _, param in module.named_parameters(remove_duplicate=False):
            self._uses[param] = self._uses.get(param, 0) + 1
        named = list(module.named_parameters())[::-1]
        total = sum(p.numel() for _, p in named)
        size = self.bucket_size or max(1 << 20, min(40_000_000, total // 8))
        groups: list[list[tuple[str, nn.Parameter]]] = [[]]
        extra: dict[tuple[Axis, ...], list[tuple[str, nn.Parameter]]] = {}
        full = 0
        for name, param in named:
            axes = tuple(a for a in placement_of(param).reduce_axes if a.size > 1)
            if axes:
                extra.setdefault(axes, []).append((name, param))
                continue
            if full >= size:
                groups.append([])
                full = 0
            groups[-1].append((name, param))
            full += param.numel()
        for axes, params in [*(((), g) for g in groups if g), *extra.items()]:
            self.buckets.append(self._make(params, axes))

    def _make(self, params: list[tuple[str, nn.Parameter]], axes: tuple[Axis, ...]) -> Bucket:
        offset, placed = 0, []
        for name, param in params:
            placed.append((name, param, offset))
            offset += -(-param.numel() // BLOCK) * BLOCK
        grain = BLOCK * self.data.size
        flat = torch.zeros(
            -(-offset // grain) * grain, dtype=self.dtype, device=params[0][1].device
        )
        bucket = Bucket(placed, flat, axes)
        for _, param, start in placed:
            self.main[param] = flat[start : start + param.numel()].view(param.shape)
            self._bucket_of[param] = bucket
        return bucket

    def begin_step(self) -> None:
        """Start a step: nothing written, nothing launched."""
        super().begin_step()
        self._last, self._next = False, 0
        for bucket in self.buckets:
            bucket.launched, bucket.shard, bucket.handle = False, None, DONE

    def begin_micro_batch(self, last: bool) -> None:
        """Start a micro-batch; buckets leave only in the last one of a step."""
        self._last = last
        for bucket in self.buckets:
            bucket.waiting = sum(self._uses[param] for _, param, _ in bucket.params)

    def done(self, param: nn.Parameter) -> None:
        """Count the use; in the last micro-batch, let complete buckets leave, in order on every
        rank.
        """
        bucket = self._bucket_of[param]
        bucket.waiting -= 1
        if not (self._last and self.overlap):
            return
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        """Start summing a bucket. On CPU: all-to-all now, and the all-gather when the next one
        leaves.
        """
        assert not bucket.launched, "a parameter gave a gradient after its bucket had left"
        bucket.launched = True
        if bucket.grad.is_cuda and not self.data.staged:
            _, bucket.handle = all_reduce(bucket.grad, self.data, async_op=True)
        else:
            bucket.shard, bucket.handle = reduce_scatter(bucket.grad, self.data, async_op=True)
            if self._next > 0:
                self._gather(self.buckets[self._next - 1])
        self._next += 1

    def _gather(self, bucket: Bucket) -> None:
        """Second half of a bucket's sum on CPU: the summed shards go to every rank."""
        if bucket.shard is None or self.data.size == 1:
            return
        bucket.handle.wait()
        full, gathering = all_gather(bucket.shard, self.data, async_op=True)
        bucket.shard = None

        def finish() -> None:
            gathering.wait()
            bucket.grad.copy_(full)

        bucket.handle = Handle(finish=finish)

    def finish(self) -> None:
        """Complete every sum: afterwards each main gradient is the global batch's.

        A parameter no one used gets zero; one used in plain autograd brings its `.grad`.
        """
        for bucket in self.buckets[self._next :]:
            for _, param, _ in bucket.params:
                if param.grad is not None:
                    self.add(param, param.grad)
                    param.grad = None
                elif param not in self._written:
                    self.main[param].zero_()
            self._launch(bucket)
        for bucket in self.buckets:
            self._gather(bucket)
            bucket.handle.wait()
            for axis in bucket.reduce_axes:
                all_reduce_in_order(bucket.grad, axis)
