# SPDX-License-Identifier: Apache-2.0
"""Work out what one rank sends in a step: which collectives, of how many bytes.

estimate/rank_profile.py measures what a micro-batch sends for its hidden states; the sums of
gradients and the gathers of weights follow from the buckets. Scalars and start-up are left out.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from estimate import activations, buffers, rank_memory
from estimate.model_profile import ModelProvider, grid_of
from mpu.grid import Grid
from mpu.optim.interface import rules_of, whole
from mpu.zero.layout import BucketLayout, Sharing
from training import batch_size
from training.config import Config
from training.optimizer import optimizer_groups
from training.schedule import messages


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step: their number, and the bytes of each whole tensor."""

    axis: str
    verb: str
    times: int
    bytes: int
    size: int  # ranks of the axis

    @property
    def sent(self) -> int:
        """Return the bytes one rank sends in a step.

        A ring sends (size - 1)/size of the tensor, twice that for an all-reduce.
        """
        if self.verb == "send":
            return self.times * self.bytes
        factor = 2 if self.verb == "all-reduce" else 1
        return self.times * factor * self.bytes * (self.size - 1) // self.size


def traffic(config: Config, provider: ModelProvider, pp_rank: int = 0) -> list[Traffic]:
    """Return what a rank sends in a step.

    For each micro-batch: the model's collectives in F, B and W, and between stages outputs and
    gradients of inputs. Once a step: gradients summed over extra axes, and the amaxes of delayed
    scales, whose maximum ranks of tp and of "dp" agree on. `_data`: over the ranks that share a
    bucket, "dp" for all that hold the same part of what tp cuts.
    """
    p, grid = config.parallel, grid_of(config, pp_rank)
    steps = batch_size.micro_batches(config, 0)
    model = activations.profile(config, provider, pp_rank)
    found = Counter((c.axis, c.verb, c.bytes) for stage in model.stages for c in stage.collectives)
    rows = [
        Traffic(axis, verb, steps * times, size, getattr(grid, axis).size)
        for (axis, verb, size), times in sorted(found.items(), key=lambda row: (-row[0][2], row[0]))
    ]
    if p.pipeline_model_parallel_size > 1:
        sends = steps * messages(config, pp_rank)
        rows.append(Traffic("pp", "send", sends, model.stages[0].message, grid.pp.size))
    rows += _partial(config, provider, grid, pp_rank)
    amaxes = Traffic("tp", "all-reduce", 1, model.amaxes, grid.tp.size)
    rows += [
        row
        for row in (amaxes, replace(amaxes, axis="dp", size=grid.dp_cp.size))
        if row.size > 1 and row.bytes
    ]
    return rows + _data(config, provider, pp_rank)


def _partial(config: Config, provider: ModelProvider, grid: Grid, pp_rank: int) -> list[Traffic]:
    """Return the sums of gradients over extra axes.

    Norms under sequence parallelism are summed over tp, tied embeddings over embd (row "pp").
    """
    sizes: Counter[str] = Counter()
    for param in rank_memory.parameters(config, provider, pp_rank).values():
        for axis in param.entry.axes:
            sizes[axis] += prod(param.shape)
    acc, names = rank_memory.accumulate_bytes(config), {"embd": "pp"}
    return [
        Traffic(names.get(axis, axis), "all-reduce", 1, count * acc, getattr(grid, axis).size)
        for axis, count in sizes.items()
    ]


def _data(config: Config, provider: ModelProvider, pp_rank: int) -> list[Traffic]:
    """Return what a rank sends over the ranks that share its buckets.

    ZeRO stage 0 all-reduces every gradient once a step; --grad-reduce-in-bf16 makes that a
    reduce-scatter in bf16 and an all-gather of the sums. From stage 1 on gradients are
    reduce-scattered, once a step or, with --zero-reduce-each-microbatch, once a micro-batch;
    several instances of the optimizer all-reduce their sums. Updated weights are all-gathered once
    a step; at stage 3 blocks are gathered when a micro-batch uses them, in a pipeline once a step.
    """
    flats = rank_memory.flats(config, provider, pp_rank)
    steps = batch_size.micro_batches(config, 0)
    gathered = buffers.gathered(config, provider, flats, steps) if config.parallel.zero > 2 else []
    rows = _exchanges(config, flats)
    for sharing in dict.fromkeys(flat.sharing for flat in flats):
        mine = [flat for flat in flats if flat.sharing == sharing]
        used = [flat for flat in gathered if flat.sharing == sharing]
        rows += _shared(config, sharing, mine, used)
    return rows


def _exchanges(config: Config, flats: list[BucketLayout]) -> list[Traffic]:
    """Return what optimizers of whole matrices declare, over the ranks that share a bucket."""
    groups, rows = optimizer_groups(config), []
    for sharing in dict.fromkeys(flat.sharing for flat in flats if flat.sharing.zero_stage):
        for rule in rules_of(groups):
            elements = sum(
                high - low
                for flat in flats
                if flat.sharing == sharing
                for low, high, name in flat.runs(whole(groups))
                if groups[name].rule == rule
            )
            axis = {"dp_cp": "dp"}.get(sharing.data, sharing.data)
            rows += [
                Traffic(axis, verb, 1, elements * nbytes, sharing.shard)
                for verb, nbytes in rule.exchanges
            ]
    return rows


def _shared(
    config: Config, sharing: Sharing, flats: list[BucketLayout], gathered: list[BucketLayout]
) -> list[Traffic]:
    """Return what is sent over the ranks of one sharing. gathered: buckets, use by use."""
    p, steps = config.parallel, batch_size.micro_batches(config, 0)
    acc, weight = rank_memory.accumulate_bytes(config), config.run.dtype.itemsize
    wire = 2 if p.grad_reduce_in_bf16 else rank_memory.gradient_bytes(config)
    axis = {"dp_cp": "dp"}.get(sharing.data, sharing.data)
    elements = sum(flat.length for flat in flats)
    last = sum(flat.length for flat in flats if flat.axes)
    if not p.zero:
        ranks = sharing.ranks
        rows = [Traffic(axis, "all-reduce", 1, elements * acc, ranks)]
        if wire < acc:
            rows = [
                Traffic(axis, "reduce-scatter", 1, elements * wire, ranks),
                Traffic(axis, "all-gather", 1, elements * acc, ranks),
            ]
        return [row for row in rows if ranks > 1]
    ranks, copies = sharing.shard, sharing.ranks // sharing.shard
    rows = [Traffic(axis, "reduce-scatter", 1, elements * wire, ranks)]
    if p.zero_reduce_each_microbatch:
        rows = [
            Traffic(axis, "reduce-scatter", steps, (elements - last) * wire, ranks),
            Traffic(axis, "reduce-scatter", 1, last * wire, ranks),
        ]
    rows.append(Traffic(axis, "all-reduce", 1, elements // ranks * acc, copies))
    if p.zero < 3:
        wires = sum(flat.wire(weight) for flat in flats)
        rows.append(Traffic(axis, "all-gather", 1, wires, ranks))
    else:
        kept = sum(flat.length for flat in flats if not flat.by_use)
        rows.append(Traffic(axis, "all-gather", 1, kept * weight, ranks))
        sizes = Counter(flat.wire(weight) for flat in gathered)
        rows += [Traffic(axis, "all-gather", n, size, ranks) for size, n in sizes.items()]
    rows.append(Traffic(axis, "all-reduce", 1, sum(flat.scales for flat in flats), ranks))
    return [row for row in rows if row.size > 1 and row.bytes]
