# SPDX-License-Identifier: Apache-2.0
"""Keep gradients in flat buckets, and sum a bucket over the data-parallel ranks as soon as it is
complete.

Parameters stand in reverse definition order, which is about the order in which backward finishes
them, so bucket 0 is complete first. Each parameter starts at a multiple of BLOCK elements, the unit
of the global norm and the grain at which a bucket may be cut among ranks. A bucket holds parameters
of one pipeline chunk, since chunks end at different times. Parameters whose gradient must also be
summed over another axis (norms under sequence parallelism, tied embeddings over the ends of a
pipeline) share the last buckets, so that this takes one collective for all of them.

Level 0 sums a bucket for everyone. At level 1 (ZeRO, Rajbhandari et al. 2020) each data-parallel
rank owns an equal part of every bucket, [low, high): the sum arrives there alone, the owner updates
that part of the weights (mpu/zero/optimizer.py), and the weights are gathered.

    last micro-batch   ... done(p) done(p) | bucket 0 leaves | done(p) ... | bucket 1 leaves | ...
    finish()           sum the last buckets over their extra axis, let them leave, wait for all
"""

from collections.abc import Callable
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
    low: int  # this rank owns [low, high): all of it at level 0
    high: int
    reduce_axes: tuple[Axis, ...] = ()
    waiting: int = 0  # uses of its parameters, in all micro-batches, that are not done yet
    launched: bool = False
    shard: Tensor | None = None
    handle: Handle = field(default=DONE)
    gathering: Handle = field(default=DONE)  # of the weights, after an update
    plain: bool = False  # a weight of it is used in plain autograd, without materialize()


class GradientBuckets(GradientSink):
    """The gradient sink of a training run.

    data: the axis gradients are summed over. bucket_size: elements a bucket, about; 0 chooses.
    overlap: let a bucket leave during backward; else all leave at `finish`. level: 0, every rank
    gets every sum; 1, its own part of each. The bits of the weights do not depend on any of them.
    """

    def __init__(
        self,
        data: Axis,
        dtype: torch.dtype = torch.float32,
        bucket_size: int = 0,
        overlap: bool = True,
        level: int = 0,
    ) -> None:
        super().__init__(dtype)
        self.data, self.bucket_size, self.overlap, self.level = data, bucket_size, overlap, level
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._uses: dict[nn.Parameter, int] = {}
        self._apart: dict[nn.Parameter, Tensor] = {}
        self._next = 0

    def attach(self, module: nn.Module, chunk_of: Callable[[str], int] = lambda name: 0) -> None:
        """Build the buckets for a module's parameters; a tied parameter counts each of its uses.

        chunk_of(name): the pipeline chunk that a parameter belongs to; chunks share no bucket.
        """
        for _, param in module.named_parameters(remove_duplicate=False):
            self._uses[param] = self._uses.get(param, 0) + 1
        named = sorted(list(module.named_parameters())[::-1], key=lambda x: -chunk_of(x[0]))
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
            if full >= size or (groups[-1] and chunk_of(groups[-1][-1][0]) != chunk_of(name)):
                groups.append([])
                full = 0
            groups[-1].append((name, param))
            full += param.numel()
        last = sorted(extra.items(), key=lambda x: [axis.name for axis in x[0]])
        for axes, params in [*(((), g) for g in groups if g), *last]:
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
        part = len(flat) // self.data.size
        low = self.data.rank * part if self.level else 0
        bucket = Bucket(placed, flat, low, low + part if self.level else len(flat), axes)
        for _, param, start in placed:
            self.main[param] = flat[start : start + param.numel()].view(param.shape)
            self._bucket_of[param] = bucket
        return bucket

    def materialize(self, param: nn.Parameter) -> Tensor:
        """Return the whole local weight, waiting for its gather where that is still on its way."""
        self._bucket_of[param].gathering.wait()
        return param

    def wait_for_weights(self) -> None:
        """Wait until every weight is whole."""
        for bucket in self.buckets:
            bucket.gathering.wait()

    def begin_step(self, micro_batches: int = 1) -> None:
        """Start a step: nothing written, nothing launched; each use is done once a micro-batch."""
        super().begin_step()
        self._next = 0
        for bucket in self.buckets:
            bucket.launched, bucket.shard, bucket.handle = False, None, DONE
            bucket.waiting = micro_batches * sum(self._uses[p] for _, p, _ in bucket.params)

    def add_rows(self, param: nn.Parameter, rows: Tensor, grad: Tensor) -> None:
        """Add grad[i] to row rows[i]; apart where the parameter has another use on this rank.

        A tied gradient is then (sum of the head's) + (sum of the embedding's), the same bits in
        every schedule and whether or not the two are on one rank.
        """
        if self._uses[param] == 1:
            return super().add_rows(param, rows, grad)
        if param not in self._apart:
            self._apart[param] = torch.zeros_like(self.main[param])
        self._apart[param].index_add_(0, rows, grad.to(self.dtype))

    def done(self, param: nn.Parameter) -> None:
        """Count the use, and let complete buckets leave, in the same order on every rank."""
        self._bucket_of[param].waiting -= 1
        while self.overlap and self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.waiting or bucket.reduce_axes:
                return
            self._complete(bucket)
            self._launch(bucket)

    def _complete(self, bucket: Bucket) -> None:
        """Bring in what was kept elsewhere: look-ups summed apart, plain autograd's `.grad`.

        A parameter that no one used gets zero.
        """
        for _, param, _ in bucket.params:
            if param in self._apart:
                self.add(param, self._apart.pop(param))
            if param.grad is not None:
                self.add(param, param.grad)
                param.grad, bucket.plain = None, True
            elif param not in self._written:
                self.main[param].zero_()

    def _launch(self, bucket: Bucket) -> None:
        """Start summing a bucket. On CPU: all-to-all now, and the all-gather when the next one
        leaves.
        """
        assert not bucket.launched, "a parameter gave a gradient after its bucket had left"
        bucket.launched = True
        if self.level:
            own = bucket.grad[bucket.low : bucket.high]
            _, bucket.handle = reduce_scatter(bucket.grad, self.data, async_op=True, into=own)
        elif bucket.grad.is_cuda and not self.data.staged:
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
        """Complete every sum: each bucket's [low, high) is then the global batch's gradient."""
        for bucket in self.buckets[self._next :]:
            self._complete(bucket)
            for axis in bucket.reduce_axes:
                all_reduce_in_order(bucket.grad, axis)
            self._launch(bucket)
        for bucket in self.buckets:
            self._gather(bucket)
            bucket.handle.wait()
