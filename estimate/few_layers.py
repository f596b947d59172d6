# SPDX-License-Identifier: Apache-2.0
"""Work out a pipeline rank of many layers from stages of few, where a model's layers are alike.

What a stage keeps and sends is a line in the number of its layers. So a rank is measured with FEW
units of layers in each of its stages and with one unit more; the difference is a unit's. A unit is
what is recomputed as one: a layer, or more under --recompute-method uniform.

    measured    embedding  0  1  2  head       the rank's     embedding  0  1  1 ... 1  2  head

The layers that recomputation of blocks takes make a second line: see `_blocks`. A model whose
layers are not alike, such as a fork's, is measured in full; so is what has no line.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from estimate.model_profile import (
    ModelProvider,
    ParameterProfile,
    model_profile,
    plannable,
    rank_parameters,
)
from estimate.rank_profile import Live, RankProfile, StageProfile, rank_profile
from mpu.pipeline.stage_layout import Stage
from mpu.zero.bucket_layout import block_of
from training.config import Config
from training.pipeline_schedule import recomputed_layers

FEW = 2  # units of a stage from which its line begins
BYTES = [field.name for field in fields(StageProfile) if field.type in (int, "int")]
Names = tuple[str, ...]


class _Chunk(NamedTuple):
    """A stage of a rank, and the stage of few layers that stands in for it.

    unit: layers of a unit. times: units of `stage` that `short` does not have.
    """

    stage: Stage
    short: Stage
    unit: int = 1
    times: int = 0


class _NoLine(Exception):
    """Names of parameters are not in the order of layers."""


def profile_of(
    config: Config, provider: ModelProvider, stages: Sequence[Stage], pp_rank: int, split: bool
) -> RankProfile:
    """Return what a pipeline rank keeps and sends, as rank_profile measures it."""
    return _profile_of(plannable(config), provider, tuple(stages), pp_rank, split)


@lru_cache(maxsize=256)
def _profile_of(
    config: Config, provider: ModelProvider, stages: tuple[Stage, ...], pp_rank: int, split: bool
) -> RankProfile:
    first, last = (any(getattr(s, end) for s in stages) for end in ("embedding", "loss"))
    if len(stages) > 1 and not (first and last) and alike(config, provider):
        parts = [_profile_of(config, provider, (s,), pp_rank, split) for s in stages]
        if not any(part.auxiliary for part in parts):
            return _together(parts)
    p = config.parallel
    block = p.recompute_granularity == "full" and p.recompute_method == "block"
    alone = p.pipeline_model_parallel_size == 1
    in_parts = p.overlap_moe_expert_parallel_comm  # these have no line
    if alike(config, provider) and not (block and alone) and not in_parts:
        how = _blocks if block else _units
        try:
            found = how(config, provider, stages, pp_rank, split)
            if found is not None and not found.auxiliary:  # these sums are of the rank, no line
                return found
        except _NoLine:
            pass
    return whole_profile(config, provider, stages, pp_rank, split)


def whole_profile(
    config: Config, provider: ModelProvider, stages: Sequence[Stage], pp_rank: int, split: bool
) -> RankProfile:
    """Return the same with every layer measured, and with live_bytes.

    Where layers are alike, ranks whose stages have the same lengths share one measurement.
    """
    same = None
    if alike(config, provider):
        same = _placed(config, stages, [len(stage.layers) for stage in stages])
    if same is None:
        return rank_profile(config, provider, stages, pp_rank, split)
    bare, rank = _bare(config, stages, pp_rank)
    found = rank_profile(bare, provider, same, rank, split)
    chunks = [_Chunk(stage, short) for stage, short in zip(stages, same, strict=True)]

    def renamed(name: str) -> str:
        place = _unit(name, chunks)
        if place is None:
            return name
        chunk = chunks[place[0]]
        return _moved(name, chunk.stage.first - chunk.short.first)

    return replace(
        found,
        uses=tuple(map(renamed, found.uses)),
        gradients=tuple(map(renamed, found.gradients)),
        looked_up=frozenset(map(renamed, found.looked_up)),
    )


def _together(parts: Sequence[RankProfile]) -> RankProfile:
    """Return the profile of a pipeline rank from those of its stages, which share no weight."""
    return RankProfile(
        stages=tuple(part.stages[0] for part in parts),
        uses=(),
        gradients=tuple(name for part in reversed(parts) for name in part.gradients),
        looked_up=frozenset().union(*(part.looked_up for part in parts)),
        live_bytes=(),
        amaxes=sum(part.amaxes for part in parts),
        loads=sum(part.loads for part in parts),
    )


def alike(config: Config, provider: ModelProvider) -> bool:
    """Return whether a rank keeps and sends as much for one layer as for another."""
    p, g, f = config.parallel, config.gpu, config.float8
    several = len(set(p.cp_comm_type)) > 1 or f.first_last_layers_bf16
    first = g.cpu_offload_activations and g.cpu_offloading_num_layers is not None
    return not (several or first) and model_profile(config, provider).alike


def _units(
    config: Config, provider: ModelProvider, stages: Sequence[Stage], pp_rank: int, split: bool
) -> RankProfile | None:
    p, few = config.parallel, FEW + config.gpu.cpu_offload_activations  # the last unit stays
    unit = (p.recompute_num_layers or 1) if p.recompute_granularity == "full" else 1
    counts = [len(stage.layers) for stage in stages]
    times = [max(0, n // unit - few - 1) for n in counts]
    more = [n - unit * k for n, k in zip(counts, times, strict=True)]
    less = [n - unit * (k > 0) for n, k in zip(more, times, strict=True)]
    large = _placed(config, stages, more)
    if large is None:
        return None
    bare, rank = _bare(config, stages, pp_rank)
    high = rank_profile(bare, provider, large, rank, split)
    chunks = [_Chunk(s, short, unit, k) for s, short, k in zip(stages, large, times, strict=True)]
    low = high
    if any(times):
        small = _placed(config, stages, less)
        assert small is not None  # it has fewer layers than `large`
        low = rank_profile(bare, provider, small, rank, split)
    extended = [
        _line(h, [(h, s, k)])
        for h, s, k in zip(high.stages, low.stages, times, strict=True)
    ]
    return replace(
        high,
        stages=tuple(extended),
        uses=_longer(high.uses, chunks, forward=True),
        gradients=_longer(high.gradients, chunks, forward=False),
        live_bytes=_live_bytes(high, low, chunks[0]) if len(stages) == 1 else (),
        amaxes=high.amaxes + (high.amaxes - low.amaxes) * max(times),
        loads=high.loads + (high.loads - low.loads) * max(times),
    )


def _blocks(
    config: Config, provider: ModelProvider, stages: Sequence[Stage], pp_rank: int, split: bool
) -> RankProfile | None:
    """Return the profile where each stage's first layers are recomputed one by one.

    Measured are stages of one layer of each kind, of two that are not recomputed, and of two that
    are.
    """
    again = [recomputed_layers(config, stage) for stage in stages]
    plain = [len(stage.layers) - n for stage, n in zip(stages, again, strict=True)]
    if max(*again, *plain) <= FEW:  # nothing is left out
        return None
    (bare, rank), found = _bare(config, stages, pp_rank), list[RankProfile]()
    for a, b in ((1, 1), (1, 2), (2, 1)):
        counts = [min(n, a) + min(m, b) for n, m in zip(again, plain, strict=True)]
        short = _placed(config, stages, counts)
        if short is None:
            return None
        own = replace(bare, parallel=replace(bare.parallel, recompute_num_layers=a))
        found.append(rank_profile(own, provider, short, rank, split))
        if (a, b) == (1, 1):
            times = [len(s.layers) - n for s, n in zip(stages, counts, strict=True)]
            chunks = [_Chunk(s, few, 1, k) for s, few, k in zip(stages, short, times, strict=True)]
    base = found[0]
    extended = [
        _line(one, [(more, one, max(0, m - 1)), (twice, one, max(0, n - 1))])
        for one, more, twice, n, m in zip(*(f.stages for f in found), again, plain, strict=True)
    ]
    gradients = _longer(base.gradients, chunks, forward=False, middle=0)
    more = ((found[1], max(0, max(plain) - 1)), (found[2], max(0, max(again) - 1)))
    return replace(
        base, stages=tuple(extended), uses=(), gradients=gradients, live_bytes=(),
        amaxes=base.amaxes + sum((other.amaxes - base.amaxes) * k for other, k in more),
        loads=base.loads + sum((other.loads - base.loads) * k for other, k in more),
    )  # fmt: skip


def parameters_of(
    config: Config, provider: ModelProvider, stages: Sequence[Stage], pp_rank: int
) -> dict[str, ParameterProfile]:
    """Return {name: parameter} of a pipeline rank, as rank_parameters has them."""
    return _parameters_of(plannable(config), provider, tuple(stages), pp_rank)


@lru_cache(maxsize=256)
def _parameters_of(
    config: Config, provider: ModelProvider, stages: tuple[Stage, ...], pp_rank: int
) -> dict[str, ParameterProfile]:
    short = None
    if alike(config, provider) and not config.optimizer.param_group:
        short = _placed(config, stages, [min(1, len(stage.layers)) for stage in stages])
    if short is None:
        return rank_parameters(config, provider, stages, pp_rank)
    bare, rank = _bare(config, stages, pp_rank)
    found = rank_parameters(bare, provider, short, rank)
    times = [max(0, len(stage.layers) - 1) for stage in stages]
    chunks = [_Chunk(s, few, 1, k) for s, few, k in zip(stages, short, times, strict=True)]
    try:
        renamed = list(_renamed(list(found), chunks, lambda seen: True, middle=0))
    except _NoLine:
        return rank_parameters(config, provider, stages, pp_rank)
    return {
        name: found[own]._replace(entry=found[own].entry._replace(name=name))
        for name, own in renamed
    }


def _bare(config: Config, stages: Sequence[Stage], pp_rank: int) -> tuple[Config, int]:
    """Return a cache key for a rank's profile, and the rank there: the run of two pipeline ranks,
    or one, and one data-parallel rank. A layer depends on more only where it has experts, or its
    weights travel in float8.
    """
    p, b = config.parallel, config.batch
    if config.expert_model_parallel_size or config.float8.fp8_param_gather:
        return config, pp_rank if any(s.embedding or s.loss for s in stages) else 1
    pp = min(2, p.pipeline_model_parallel_size)
    parallel = replace(
        p, world_size=p.tensor_model_parallel_size * p.context_parallel_size * pp,
        pipeline_model_parallel_size=pp, pipeline_schedule=None,
        num_virtual_stages_per_pipeline_rank=None, pipeline_model_parallel_layout=None,
        num_layers_per_virtual_pipeline_stage=None, num_distributed_optimizer_instances=1,
        microbatch_group_size_per_virtual_pipeline_stage=None,
    )  # fmt: skip
    batch = replace(b, global_batch_size=b.micro_batch_size, step_batch_size_schedule=None)
    rank = int(not any(stage.embedding for stage in stages))
    return replace(config, parallel=parallel, batch=batch), rank


def _placed(
    config: Config, stages: Sequence[Stage], counts: Sequence[int]
) -> tuple[Stage, ...] | None:
    """Return stages of so many layers with the same ends, or None where the model has too few."""
    total = config.model.num_layers
    at, end = int(not any(stage.embedding for stage in stages)), total
    found = []
    for stage, count in zip(stages, counts, strict=True):
        if stage.embedding:
            first = 0
            at = max(at, count)
        elif stage.loss:
            first = end = total - count
        else:
            first, at = at, at + count
        found.append(Stage(first, first + count, stage.embedding, stage.loss))
    return tuple(found) if at <= end else None


def _line(
    base: StageProfile, steps: Sequence[tuple[StageProfile, StageProfile, int]]
) -> StageProfile:
    """Return base plus, for each step, so many times the difference of its two profiles."""
    values = {name: getattr(base, name) for name in BYTES}
    sent = Counter(base.collectives)
    for more, less, times in steps:
        if not times:
            continue
        for name in BYTES:
            values[name] += times * (getattr(more, name) - getattr(less, name))
        for each, count in Counter(more.collectives).items():
            sent[each] += times * count
        for each, count in Counter(less.collectives).items():
            sent[each] -= times * count
    return StageProfile(**values, collectives=tuple(sent.elements()))


def _longer(names: Names, chunks: Sequence[_Chunk], forward: bool, middle: int = 1) -> Names:
    """Return names of parameters in the order of the long rank. forward: they begin with a forward
    pass; else they are of a backward alone.
    """
    renamed = _renamed(names, chunks, lambda seen: forward and not seen, middle)
    return tuple(name for name, _ in renamed)


def _renamed(
    names: Sequence[str], chunks: Sequence[_Chunk], ascends: Callable[[bool], bool], middle: int
) -> Iterator[tuple[str, str]]:
    """Yield (name, measured name) in the long rank's order: a chunk's unit number `middle` stands
    for those that were left out too.

    ascends(seen): whether these come in ascending order, given that the unit was seen before.
    Raises _NoLine where a pass does not come by a unit's parameters at one time.
    """
    seen = Counter[tuple[int, int]]()
    for key, same in groupby(names, key=lambda name: _unit(name, chunks)):
        own = list(same)
        if key is None:
            yield from ((name, name) for name in own)
            continue
        chunk, number = chunks[key[0]], key[1]
        up = ascends(seen[key] > 0)
        seen[key] += 1
        copies = [number + chunk.times * (number > middle)]
        if number == middle:
            copies = list(range(number, number + chunk.times + 1))
            copies = copies if up else copies[::-1]
        for copy in copies:
            move = (copy - number) * chunk.unit + chunk.stage.first - chunk.short.first
            yield from ((_moved(name, move), name) for name in own)
    if any(count > 2 for count in seen.values()):
        raise _NoLine


def _unit(name: str, chunks: Sequence[_Chunk]) -> tuple[int, int] | None:
    """Return the chunk and the unit of a parameter of the measured stages."""
    block = block_of(name)
    if not block:
        return None
    layer = int(block.rpartition(".")[2])
    for number, chunk in enumerate(chunks):
        if layer in chunk.short.layers:
            return number, (layer - chunk.short.first) // chunk.unit
    raise _NoLine


def _moved(name: str, by: int) -> str:
    """Return the name of the same parameter, so many layers further."""
    block = block_of(name)
    start, _, layer = block.rpartition(".")
    return f"{start}.{int(layer) + by}{name[len(block):]}"


def _live_bytes(high: RankProfile, low: RankProfile, chunk: _Chunk) -> tuple[Live, ...]:
    """Return `live_bytes` of the long stage: a unit in its backward has all units left out above it
    or below it, and what each of these has stored, or keeps for W, is the same.
    """
    if not chunk.times:
        return high.live_bytes

    def parts(found: RankProfile) -> list[tuple[int | None, list[Live]]]:
        both = zip(found.gradients, found.live_bytes, strict=True)
        keyed = groupby(both, key=lambda item: _unit(item[0], [chunk]))
        return [(key and key[1], [live for _, live in same]) for key, same in keyed]

    many, few = parts(high), parts(low)
    middle = [n for n, (unit, _) in enumerate(many) if unit == 1]  # of B, and of W if it is apart
    short = [part for n, part in enumerate(many) if n not in middle]
    if not middle or [len(own) for _, own in short] != [len(own) for _, own in few]:
        raise _NoLine
    out: list[Live] = []
    for n, (unit, own) in enumerate(many):
        at = n - sum(place < n for place in middle)  # the same in `few`, or what is below it
        if unit != 1:
            out += [a.plus(chunk.times, a, b) for a, b in zip(own, few[at][1], strict=True)]
            continue
        if [part[0] for part in many[n - 1 : n + 2]] != [2, 1, 0]:
            raise _NoLine
        ends = [(many[n - 1], few[at - 1]), (many[n + 1], few[at])]
        (top, of_top), (bottom, of_bottom) = ((a[1], b[1]) for a, b in ends)
        if len({*map(len, (own, top, bottom))}) > 1:
            raise _NoLine
        for k in range(chunk.times, -1, -1):  # so many of those left out are below it
            out += [
                a.plus(k, u, v).plus(chunk.times - k, w, x)
                for a, u, v, w, x in zip(own, top, of_top, bottom, of_bottom, strict=True)
            ]
    return tuple(out)
