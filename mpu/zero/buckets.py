# SPDX-License-Identifier: Apache-2.0
"""Keep weights and gradients in flat buckets; sum a bucket's gradients over the data-parallel ranks
as soon as they are complete.

mpu/zero/layout.py says which parameters share a bucket. Each rank owns an equal part of every
bucket, [low, high), and the level (ZeRO, Rajbhandari et al. 2020) says what else it keeps:

    0   all of it; every rank gets the sums and makes every update
    1   all of it; a sum arrives at its owner, which updates its part; the weights are gathered
    2   of gradients the owner's sum, and a buffer from a bucket's first gradient to its sum
    3   of weights too the owner's part; a block's are gathered for use (mpu/zero/weights.py)

    last micro-batch   ... done(p) done(p) | bucket 0 leaves | done(p) ... | bucket 1 leaves | ...
    finish()           sum the last buckets over their extra axis, let them leave, wait for all
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpu.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_in_order,
    gather_bytes,
    reduce_scatter,
)
from mpu.comm.handle import Handle, Label
from mpu.grid import Axis, Grid
from mpu.param import GradientSink, placement_of
from mpu.zero.layout import Entry, Flat, Sharing, automatic_size, cut, gaps
from mpu.zero.weights import FlatWeights, Gatherer


@dataclass(eq=False)
class Bucket(FlatWeights):
    """Flat weights and gradients of some parameters, and how far the gradients' sum has come."""

    layout: Flat
    own_grad: Tensor  # the sum of [low, high)
    grad: Tensor | None  # this rank's own sum of all of it; None while there is none (levels 2, 3)
    reduce_axes: tuple[Axis, ...] = ()
    uses: int = 0  # of its parameters, in one micro-batch
    rounds: int = 0  # times it leaves yet in this step
    summed: bool = False  # own_grad holds the sum of an earlier micro-batch
    steps: Iterator[Handle] = field(default=iter(()))
    handle: Handle | None = None  # of the step of its sum that is under way
    plain: bool = False  # a weight of it is used in plain autograd, without materialize()


class GradientBuckets(GradientSink):
    """The gradient sink of a training run, and the holder of its weights.

    dtype: of the sums. Gradients are summed over grid.data, or, where there are several instances
    of the optimizer, over the ranks that share one (grid.shard) and then over grid.replica. The
    bits of the weights depend on that, each_micro_batch, wire and main only (docs/numerics.md).
    """

    def __init__(
        self,
        grid: Grid,
        dtype: torch.dtype = torch.float32,
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__(dtype)
        self.grid = grid
        self.sharing = sharing = sharing or Sharing()
        self.shard, self.replica = grid.shard, grid.replica
        self.level = sharing.level if self.shard.size > 1 else 0
        self.each = sharing.each_micro_batch and self.level >= 2
        self.main_dtype = sharing.main or dtype
        self.buckets: list[Bucket] = []
        self.gatherer = Gatherer(self.shard, sharing.gather_ahead, sharing.keep)
        self.live = self.peak = 0  # bytes of gradient buffers, at levels 2 and 3
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._uses: dict[nn.Parameter, int] = {}
        self._apart: dict[nn.Parameter, Tensor] = {}
        self._next = 0  # bucket to leave
        self._last: Bucket | None = None  # that left

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what a new weight lies in: at level 3 no memory, until `fill`."""
        if self.level < 3:
            return super().empty(shape, dtype, device)
        return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)

    def attach(self, module: nn.Module, chunk_of: Callable[[str], int] = lambda name: 0) -> None:
        """Build the buckets for a module's parameters; a tied parameter counts each of its uses.

        chunk_of(name): the pipeline chunk that a parameter belongs to; chunks share no bucket.
        """
        for _, param in module.named_parameters(remove_duplicate=False):
            self._uses[param] = self._uses.get(param, 0) + 1
        params = dict(module.named_parameters())
        axes: dict[tuple[str, ...], tuple[Axis, ...]] = {}
        entries = []
        for name, param in params.items():
            extra = tuple(a for a in placement_of(param).reduce_axes if a.size > 1)
            names = tuple(a.name for a in extra)
            axes[names] = extra
            entries.append(Entry(name, param.numel(), chunk_of(name), names))
        self.bucket_size = self.sharing.bucket_size
        if not self.bucket_size:  # chosen with all ranks of the pipeline, by the one with most
            own = str(sum(entry.numel for entry in entries)).encode()
            device = next(iter(params.values())).device
            every = gather_bytes(own, self.grid.pp, device)
            self.bucket_size = automatic_size(max(map(int, every)))
        for flat in cut(entries, self.bucket_size, self.grid.data.size, self.level == 3):
            self.buckets.append(self._make(flat, params, axes[flat.axes]))

    def _make(self, flat: Flat, params: dict[str, nn.Parameter], axes: tuple[Axis, ...]) -> Bucket:
        placed = [(name, params[name], offset) for name, offset, _ in flat.params]
        first = placed[0][1]
        part = flat.length // self.shard.size
        low = self.shard.rank * part if self.level else 0
        high = low + part if self.level else flat.length
        grad = None
        if self.level < 2:
            grad = torch.zeros(flat.length, dtype=self.main_dtype, device=first.device)
        if grad is not None and self.main_dtype == self.dtype:
            own_grad = grad[low:high]
        else:
            own_grad = torch.zeros(high - low, dtype=self.dtype, device=first.device)
        sharded = self.level == 3 and not axes
        bucket = Bucket(placed, flat.length, low, high, sharded, flat, own_grad, grad, axes)
        bucket.allocate(first.dtype, first.device)
        for _, param, _ in placed:
            self._bucket_of[param] = bucket
            bucket.uses += self._uses[param]
        self._open(bucket)
        return bucket

    def fill(self) -> Iterator[set[str]]:
        """Yield names of parameters that may be written now: all at once, but at level 3 a bucket
        at a time, of which this rank keeps its part."""
        yield self.whole_names()
        for bucket in self.buckets:
            if bucket.sharded:
                flat = bucket.own.new_zeros(bucket.length)
                bucket.show(flat, copy=True)
                yield {name for name, _, _ in bucket.params}
                bucket.own.copy_(flat[bucket.low : bucket.high])
                bucket.hide()

    def whole_names(self) -> set[str]:
        """Name the parameters whose weights this rank keeps whole."""
        return {name for b in self.buckets if not b.sharded for name, _, _ in b.params}

    def materialize(self, param: nn.Parameter) -> Tensor:
        """Return the whole local weight, waiting for its gather where that is still on its way."""
        bucket = self._bucket_of[param]
        if bucket.sharded:
            self.gatherer.take(bucket)
        bucket.gathering.wait()
        return param

    def is_sharded(self, param: nn.Parameter) -> bool:
        """Say whether the weight is whole only between `materialize` and `release`."""
        return self._bucket_of[param].sharded

    def release(self, param: nn.Parameter) -> None:
        """Say that the weight is not needed for now; it goes when another bucket is used."""
        bucket = self._bucket_of[param]
        bucket.users -= bucket.sharded

    def wait_for_weights(self) -> None:
        """Wait until every weight that is kept whole is whole."""
        for bucket in self.buckets:
            bucket.gathering.wait()

    def begin_step(self, micro_batches: int = 1) -> None:
        """Start a step: nothing written, nothing launched; each use is done once a micro-batch."""
        super().begin_step()
        self._next, self._last = 0, None
        for bucket in self.buckets:
            each = self.each and not bucket.reduce_axes
            bucket.rounds = micro_batches if each else 1
            bucket.summed = False
            bucket.waiting = bucket.uses * (1 if each else micro_batches)
        self.gatherer.begin(micro_batches)

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return the parameter's part of its bucket's gradients, which are allocated if need be."""
        if param not in self.main:
            bucket = self._bucket_of[param]
            bucket.grad = bucket.own.new_empty(bucket.length, dtype=self.main_dtype)
            for low, high in gaps(bucket.layout):
                bucket.grad[low:high].zero_()
            self._open(bucket)
        return self.main[param]

    def _open(self, bucket: Bucket) -> None:
        """Let gradients into the bucket's buffer."""
        if bucket.grad is None:
            return
        if self.level >= 2:
            self.live += bucket.grad.nbytes
            self.peak = max(self.peak, self.live)
        for _, param, start in bucket.params:
            self.main[param] = bucket.grad[start : start + param.numel()].view(param.shape)

    def _close(self, bucket: Bucket) -> Tensor:
        """Let no more gradients into the bucket's buffer; return it."""
        assert (grad := bucket.grad) is not None
        if self.level >= 2:
            bucket.grad = None
            for _, param, _ in bucket.params:
                del self.main[param]
        return grad

    def add_rows(self, param: nn.Parameter, rows: Tensor, grad: Tensor) -> None:
        """Add grad[i] to row rows[i]; apart where the parameter has another use on this rank.

        A tied gradient is then (sum of the head's) + (sum of the embedding's), the same bits in
        every schedule and whether or not the two are on one rank.
        """
        if self._uses[param] == 1:
            return super().add_rows(param, rows, grad)
        if param not in self._apart:
            self._apart[param] = torch.zeros_like(self.main_grad(param))
        apart = self._apart[param]
        apart.index_add_(0, rows, grad.to(apart.dtype))

    def done(self, param: nn.Parameter) -> None:
        """Count the use, and let complete buckets leave, in the same order on every rank."""
        bucket = self._bucket_of[param]
        assert bucket.rounds, "a parameter gave a gradient after its bucket had left"
        bucket.waiting -= 1
        while (self.sharing.overlap or self.each) and self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.waiting or bucket.reduce_axes:
                return
            self._complete(bucket)
            self._launch(bucket)
            if not self.sharing.overlap:
                self._drain(bucket)
            self._next += 1
            if bucket.rounds and self._next == sum(not b.reduce_axes for b in self.buckets):
                self._next = 0  # the next micro-batch

    def _complete(self, bucket: Bucket) -> None:
        """Bring in look-ups summed apart and plain autograd's `.grad`; zero where no one wrote."""
        for name, param, _ in bucket.params:
            if param in self._apart:
                self.add(param, self._apart.pop(param))
            if param.grad is not None:
                if bucket.sharded:
                    raise RuntimeError(
                        f"{name} was used in plain autograd, which at ZeRO level 3 sees no weight: "
                        "take it by mpu.param.use(weight, ctx.sink)"
                    )
                self.add(param, param.grad)
                param.grad, bucket.plain = None, True
            elif param not in self._written:
                self.main_grad(param).zero_()

    def _launch(self, bucket: Bucket) -> None:
        """Start summing a bucket, and go on with the one that left before it."""
        self._drain(bucket)  # of an earlier micro-batch
        bucket.rounds -= 1
        bucket.steps = self._reduce(bucket, self._close(bucket))
        bucket.handle = next(bucket.steps, None)
        if self._last not in (None, bucket):
            self._advance(self._last)
        self._last = bucket
        self._written.difference_update(param for _, param, _ in bucket.params)
        if bucket.rounds:
            bucket.waiting = bucket.uses
        else:
            self.gatherer.give_back(bucket)

    def _reduce(self, bucket: Bucket, grad: Tensor) -> Iterator[Handle]:
        """Sum a bucket over the data-parallel ranks; each step runs until the next is asked for.

        To the owner, then over the other instances of the optimizer; at level 0 back to everyone.
        """
        own, shard, replica = bucket.own_grad, self.shard, self.replica
        label = Label(bucket, "grad sum")
        narrow = self.sharing.wire not in (None, grad.dtype) and shard.size > 1
        if not self.level:
            part = bucket.length // shard.size
            own = grad[shard.rank * part : (shard.rank + 1) * part]
        if self.level or not grad.is_cuda or shard.staged or narrow or replica.size > 1:
            into = torch.empty_like(own) if bucket.summed else own
            put = grad.to(self.sharing.wire) if narrow else grad
            _, handle = reduce_scatter(put, shard, True, into, label)
            del put
            yield handle
            if self.level >= 2:
                self.live -= grad.nbytes
                grad = own  # the buffer is free
            if bucket.summed:
                own.add_(into)
            bucket.summed = True
            if replica.size > 1 and not bucket.rounds:
                piece, handle = reduce_scatter(own, replica, True, None, label)
                yield handle
                yield all_gather(piece, replica, True, own, label)[1]
            if not self.level:
                yield all_gather(own, shard, True, grad, label)[1]
        else:
            yield all_reduce(grad, self.shard, True, label=label)[1]
        if not self.level and grad.dtype != self.dtype:
            bucket.own_grad.copy_(grad)

    def _advance(self, bucket: Bucket) -> None:
        """Wait for the step of the bucket's sum that is under way, and start the next, if any."""
        if bucket.handle is not None:
            bucket.handle.wait()
            bucket.handle = next(bucket.steps, None)

    def _drain(self, bucket: Bucket) -> None:
        while bucket.handle is not None:
            self._advance(bucket)

    def finish(self) -> None:
        """Complete every sum: each bucket's own_grad is then the global batch's gradient."""
        for bucket in self.buckets:
            if bucket.rounds:
                bucket.rounds = 1
                self._complete(bucket)
                for axis in bucket.reduce_axes:
                    assert bucket.grad is not None
                    all_reduce_in_order(bucket.grad, axis, Label(bucket, "grad sum"))
                self._launch(bucket)
        for bucket in self.buckets:
            self._drain(bucket)
            bucket.waiting = 0
        self.gatherer.begin(0)
