# SPDX-License-Identifier: Apache-2.0
"""A rank's weights and gradients in flat buckets, reduced in the same order on every rank.

mpu/zero/bucket_layout.py decides which parameters share a bucket, mpu/zero/bucket.py has one
bucket's state, mpu/zero/reduce.py sums it.

    last micro-batch      ... ready(p) ready(p) | bucket 0 leaves | ready(p) ... | bucket 1 leaves
    finish_grad_sync()    sum the last buckets, also over their extra axis; wait for all sums

A bucket leaves when the sum of its gradients starts. ready(p) is register_grad_ready(p): a use of
parameter p has added its gradient. Frozen parameters are in separate buckets, `frozen_buckets`,
which contain only weights and are never summed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from mpu.comm.collectives import all_gather, gather_bytes
from mpu.comm.transport import Axis, Label
from mpu.gradients import GradientSink
from mpu.grid import DATA, Grid
from mpu.param import Placement, PlacementError, placement_of, without_axis
from mpu.zero.bucket import LiveBytes, ParamAndGradBucket, ParamBucket
from mpu.zero.bucket_layout import (
    Sharing,
    ZeroConfig,
    automatic_size,
    block_of,
    entries_of,
    make_buckets,
    sharing_of,
)
from mpu.zero.frozen import Frozen, agree
from mpu.zero.gather import Gatherer, fill
from mpu.zero.gradient_check import GradientCheck, check_registered
from mpu.zero.reduce import Reduction


class ParamAndGradBuffer(GradientSink):
    """The gradient sink of a training run, which also holds its weights.

    dtype: the dtype of the sums. The axis that cuts a parameter determines the ranks that hold the
    same part of it (Grid.data): gradients are summed over their `shard` and then, if the optimizer
    has several instances, over `replicate`. The bits of the weights depend only on these axes,
    reduce_each_micro_batch and the dtypes (docs/numerics.md). zero_stage: the highest stage in
    effect for any bucket.
    """

    def __init__(
        self, grid: Grid, dtype: torch.dtype = torch.float32, config: ZeroConfig | None = None
    ) -> None:
        super().__init__(dtype)
        self.grid = grid
        self.config = config = config or ZeroConfig()
        main, wire = config.main_grads_dtype or dtype, config.grad_reduce_dtype
        self._sharing: dict[str, Sharing] = {}  # by the axis that cuts a parameter
        self._reduction: dict[str, Reduction] = {}
        for cut in DATA:
            _, every, shard, replicate = grid.data(cut)
            shared = sharing_of(cut, every.size, shard.size, config.zero_stage)
            self._sharing[cut] = shared
            # without overlap, the sum of each micro-batch is synchronous
            each = config.reduce_each_micro_batch and shared.zero_stage >= 2
            self._reduction[cut] = Reduction(
                shared.zero_stage, shard, replicate, dtype, main, wire,
                is_async=config.overlap_grad_reduce or not each,
            )  # fmt: skip
        self.zero_stage = max(shared.zero_stage for shared in self._sharing.values())
        self.each = config.reduce_each_micro_batch and self.zero_stage >= 2
        self._module, self._lines = nn.Module(), dict[str, Sequence[str]]()  # see attach
        self.buckets: list[ParamAndGradBucket] = []
        self.frozen_buckets: list[ParamBucket] = []
        self.frozen = Frozen()  # the frozen parameters of the whole model
        self.device = torch.device("cpu")  # of the weights
        self.live = LiveBytes()  # bytes of unsharded gradients, at stages 2 and 3
        self.check: GradientCheck | None = None  # in a run's first steps
        self.gatherer: Gatherer | None = None
        if self.zero_stage == 3:
            self.gatherer = Gatherer(config.overlap_param_gather, config.keep_unsharded)
        self._bucket_of: dict[nn.Parameter, ParamBucket] = {}
        self._uses: dict[nn.Parameter, int] = {}  # expected gradients per micro-batch
        self._given: dict[nn.Parameter, int] = {}  # gradients so far in this step
        self._micro_batches = 1
        self._row_sums: dict[nn.Parameter, Tensor] = {}  # see add_rows
        self._early: list[ParamAndGradBucket] = []  # buckets that may leave during backward
        self._next = 0  # index in _early of the bucket that leaves next
        self._last: ParamAndGradBucket | None = None  # the bucket that left last

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for a new weight; at stage 3 it has no memory until `fill`."""
        if self.zero_stage < 3:
            return super().empty(shape, dtype, device)
        return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape)

    def attach(
        self,
        module: nn.Module,
        chunk_of: Callable[[str], int] = lambda name: 0,
        uses: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Build the buckets for a module's parameters.

        The number of gradients that a parameter receives per micro-batch is the number of modules
        that register it (two for a tied one) or, if larger, the number of its entries in `uses`,
        {name: the line of each use in a forward}. A parameter with requires_grad False is frozen:
        it has weights in a bucket, and no gradient.

        chunk_of(name): the pipeline chunk that a parameter belongs to; chunks share no bucket. A
        plain nn.Parameter counts as replicated over tp. Raises PlacementError if a module holds an
        unregistered tensor that requires a gradient, and as `agree` does.
        """
        check_registered(module)
        for _, param in module.named_parameters(remove_duplicate=False):
            self._uses[param] = self._uses.get(param, 0) + 1
        self._module, self._lines = module, dict(uses or {})
        for name, param in module.named_parameters(remove_duplicate=False):
            self._uses[param] = max(self._uses[param], len(self._lines.get(name, ())))
        params = dict(module.named_parameters())
        for param in params.values():
            if not hasattr(param, "placement"):
                param.placement = Placement(tuple(param.shape), axis=self.grid.tp)  # type: ignore[attr-defined]
        axes: dict[tuple[str, ...], tuple[Axis, ...]] = {}
        (first, of), *others = params.items()
        for name, param in others:
            if param.dtype != of.dtype:
                raise PlacementError(
                    f"{name} is {param.dtype} and {first} is {of.dtype}: a bucket has one "
                    "dtype, so all parameters need that of the run (LayerContext.dtype)"
                )
        for name, param in params.items():
            if why := without_axis(name, param, self.grid.world_size, self.grid.ep_size):
                raise PlacementError(why)
            extra = tuple(a for a in placement_of(param).reduce_axes if a.size > 1)
            axes[tuple(a.name for a in extra)] = extra
        self.device = next(iter(params.values())).device
        self.frozen = agree(params, chunk_of, self.grid, self.device)
        entries = entries_of(params.items(), chunk_of)
        self.bucket_size = self.config.bucket_size
        if not self.bucket_size:  # set for all by the pipeline rank with the most parameters
            own = str(sum(entry.numel for entry in entries)).encode()
            every = gather_bytes(own, self.grid.pp, self.device)
            self.bucket_size = automatic_size(max(map(int, every)))
        for layout in make_buckets(entries, self.bucket_size, self._sharing):
            in_bucket = [params[name] for name, _, _ in layout.params]
            if layout.frozen:
                shared = self._reduction[layout.sharing.cut].shard if layout.sharded else None
                self.frozen_buckets.append(ParamBucket(layout, params, shared))
                self._bucket_of |= dict.fromkeys(in_bucket, self.frozen_buckets[-1])
                continue
            bucket = ParamAndGradBucket(
                layout,
                params,
                sum(self._uses[param] for param in in_bucket),
                reduction=self._reduction[layout.sharing.cut],
                reduce_axes=axes[layout.axes],
                main=self.main,
                live=self.live,
            )
            self.buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(in_bucket, bucket)
        stage = 2 if self.each else 0
        self._early = [
            b for b in self.buckets if not b.reduce_axes and b.reduction.zero_stage >= stage
        ]
        blocks: dict[tuple[str, str], list[ParamBucket]] = {}
        for each in self.weight_buckets if self.frozen_buckets else ():
            if each.sharded and (block := block_of(each.layout.params[0][0])):
                each.block = blocks.setdefault((block, each.layout.sharing.cut), [])
                each.block.append(each)

    @property
    def weight_buckets(self) -> list[ParamBucket]:
        """Return all buckets, with those of frozen parameters last."""
        return [*self.buckets, *self.frozen_buckets]

    def fill(self) -> Iterator[set[str]]:
        """Yield names of parameters, which may be written until the generator is resumed.

        Unsharded weights come first, all at once, then those of stage 3 by bucket, of which this
        rank keeps its part.
        """
        yield self.unsharded_names()
        yield from fill(self.weight_buckets)
        self.weight_rows.clear()

    def gather_weights(self) -> None:
        """Gather the weights that are stored unsharded, after an update or a load.

        With overlap_param_gather this does not wait for them.
        """
        self.weight_rows.clear()
        forward = sorted(reversed(self.buckets), key=lambda bucket: bucket.layout.late)
        for bucket in forward:  # about the order of the next forward
            if bucket.shard is not None and not bucket.sharded:
                own, into, label = bucket.param_shard, bucket.weights, Label(bucket, "update")
                _, bucket.gathering = all_gather(own, bucket.shard, True, into=into, label=label)
        for bucket in self.buckets:
            if bucket.plain or not self.config.overlap_param_gather:
                bucket.gathering.wait()

    def holders(self, param: nn.Parameter) -> Axis:
        """Return the data-parallel ranks that keep the same elements of a parameter's state."""
        bucket = self._holding(param)
        data = self.grid.data(bucket.layout.sharing.cut)
        return data.every if bucket.shard is None else data.replicate

    def unsharded_names(self, gathered: bool = True) -> set[str]:
        """Return the names of the parameters whose weights this rank stores unsharded.

        gathered: include those of which it owns a part, and that gather_weights completes.
        """
        buckets = (b for b in self.weight_buckets if not b.sharded and (gathered or not b.shard))
        return {name for bucket in buckets for name, _, _ in bucket.params}

    def acquire(self, param: nn.Parameter) -> Tensor:
        """Return the whole local weight; wait for its gather."""
        bucket = self._holding(param)
        if self.gatherer and bucket.sharded:
            self.gatherer.acquire(bucket)
        bucket.gathering.wait()
        if bucket.state is not None:
            bucket.state.leave()
        return param

    def is_sharded(self, param: nn.Parameter) -> bool:
        """Return whether the weight is unsharded only between `acquire` and `end_use`."""
        return self._holding(param).sharded

    def end_use(self, param: nn.Parameter) -> None:
        """End a use of the weight; a sharded weight is freed when another bucket is used."""
        bucket = self._holding(param)
        if self.gatherer and bucket.sharded:
            self.gatherer.end_use(bucket)

    def wait_for_weights(self) -> None:
        """Wait until every weight that is stored unsharded has arrived."""
        for bucket in self.buckets:
            bucket.gathering.wait()

    def begin_step(self, micro_batches: int = 1) -> None:
        """Start a step with a number of micro-batches: reset the state of gradients and sums.

        Raises PlacementError if a parameter was frozen or unfrozen since `attach`.
        """
        super().begin_step()
        for each in self.weight_buckets:
            for name, param, _ in each.params:
                if param.requires_grad == each.layout.frozen:
                    raise PlacementError(
                        f"{name}: requires_grad is {param.requires_grad} and was "
                        f"{not param.requires_grad} when the model was built: set it in the "
                        "model's __init__, and resume with --no-load-optim to train another subset"
                    )
        self._next, self._last, self._micro_batches = 0, None, micro_batches
        self._given.clear()
        for bucket in self.buckets:
            bucket.begin_step(micro_batches, self.each)
        for frozen in self.frozen_buckets:
            frozen.waiting = 1  # its weights may be used until the end of the step
        if self.gatherer:
            self.gatherer.begin_pass(micro_batches)

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return the parameter's part of its bucket's gradients; allocate these if needed."""
        if param not in self.main:
            self._of(param).open_grad()
        return self.main[param]

    def _of(self, param: nn.Parameter) -> ParamAndGradBucket:
        """Return the bucket of a parameter's gradient. Raises RuntimeError if it is frozen."""
        bucket = self._holding(param)
        if not isinstance(bucket, ParamAndGradBucket):
            raise RuntimeError(
                f"{self.name_of(param)} is frozen, but its layer's backward gives it a gradient: "
                "the backward must check needs_input_grad of the weight (docs/forking.md)"
            )
        return bucket

    def name_of(self, param: nn.Parameter) -> str:
        """Return a parameter's name and its module's type."""
        for name, each in self._module.named_parameters():
            if each is param:
                owner = self._module.get_submodule(name.rpartition(".")[0])
                return f"{name} of {type(owner).__name__}"
        return super().name_of(param)

    def _holding(self, param: nn.Parameter) -> ParamBucket:
        """Return the bucket of a weight. Raises RuntimeError if it has none."""
        bucket = self._bucket_of.get(param)
        if bucket is None:
            raise RuntimeError(
                f"{self.name_of(param)} is used, but was not a parameter of the model when the "
                "buckets were made: create it in a module's __init__, as an attribute"
            )
        return bucket

    def add_rows(self, param: nn.Parameter, rows: Tensor, grad: Tensor) -> None:
        """Add grad[i] to row rows[i]: rows [n], grad [n, h].

        If the parameter has another use on this rank (a tied head), rows are summed separately. The
        gradient is then (sum of the head's) + (sum of the embedding's): the same bits in every
        schedule, and whether or not the two are on the same rank.
        """
        if self._uses[param] == 1:
            return super().add_rows(param, rows, grad)
        if param not in self._row_sums:
            self._row_sums[param] = torch.zeros_like(self.main_grad(param))
        sums = self._row_sums[param]
        sums.index_add_(0, rows, grad.to(sums.dtype))

    def register_grad_ready(self, param: nn.Parameter) -> None:
        """Count the use, and start the sums of ready buckets, in the same order on every rank.

        Raises RuntimeError, with the parameters' names, if there are more gradients than uses.
        """
        bucket, self._given[param] = self._of(param), self._given.get(param, 0) + 1
        if not bucket.rounds:
            raise RuntimeError(self._too_many(bucket, param))
        bucket.register_grad_ready()
        while (self.config.overlap_grad_reduce or self.each) and self._next < len(self._early):
            bucket = self._early[self._next]
            if not bucket.is_ready:
                return
            self._leave(bucket)
            if not self.config.overlap_grad_reduce:
                bucket.wait()
            self._next += 1
            if bucket.rounds and self._next == len(self._early):
                self._next = 0  # the next micro-batch

    def _too_many(self, bucket: ParamAndGradBucket, late: nn.Parameter) -> str:
        """Return the message for a parameter with more gradients than uses in a forward."""
        expected = {p: self._uses[p] * self._micro_batches for _, p, _ in bucket.params}
        more = [p for p in expected if self._given.get(p, 0) > expected[p]] or [late]
        name = next(name for name, p, _ in bucket.params if p is more[0])
        lines, count = self._lines.get(name, ()), self._uses[more[0]]
        where = f" ({', '.join(dict.fromkeys(lines))})" if lines else ""
        others = f" (and {len(more) - 1} more parameters of its bucket)" if more[1:] else ""
        return (
            f"{self.name_of(more[0])}{others} gave its gradient "
            f"{self._given[more[0]]} times in {self._micro_batches} micro-batches, and a forward "
            f"uses it {count} time{'s' * (count != 1)}{where}: the reduction of its bucket had "
            "begun before the last gradient. A forward must use a weight equally often in each "
            "micro-batch and on meta tensors, where uses are counted (docs/forking.md). Without "
            "--overlap-grad-reduce and --zero-reduce-each-microbatch reductions begin after the "
            "last micro-batch"
        )

    def _leave(self, bucket: ParamAndGradBucket) -> None:
        """Start the sum of a bucket, and the next collective of the previous bucket's sum."""
        self._complete(bucket)
        if self.check:
            self.check.before_sum(bucket)
        bucket.start_grad_sync()
        if self._last is not None and self._last is not bucket:
            self._last.wait_and_start_next()
        self._last = bucket
        self.written.difference_update(param for _, param, _ in bucket.params)
        if self.gatherer and not bucket.rounds:
            self.gatherer.reshard_if_unused(bucket)

    def _complete(self, bucket: ParamAndGradBucket) -> None:
        """Add separately summed look-ups and plain autograd's `.grad`; zero unwritten gradients."""
        for name, param, _ in bucket.params:
            if param in self._row_sums:
                self.add(param, self._row_sums.pop(param))
            if param.grad is not None:
                if bucket.sharded:
                    raise RuntimeError(
                        f"{name} was used in plain autograd, but at ZeRO stage 3 it has no values "
                        "there: use the result of mpu.gradients.use(weight, ctx.sink)"
                    )
                self.add(param, param.grad)
                param.grad, bucket.plain = None, True
            elif param not in self.written:
                self.main_grad(param).zero_()
                if self.check:
                    self.check.unwritten.add(name)

    def finish_grad_sync(self) -> None:
        """Complete every sum: each bucket's grad_shard is then the global batch's gradient."""
        for bucket in self.buckets:
            if bucket.rounds:
                bucket.rounds = 1
                self._leave(bucket)
        for bucket in self.buckets:
            bucket.wait()
        for each in self.weight_buckets:
            each.waiting = 0
        if self.gatherer:
            self.gatherer.begin_pass(0)
        if self.check and self.check.finish(self.buckets, self.device):
            self.check = None
