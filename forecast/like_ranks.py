# SPDX-License-Identifier: Apache-2.0
"""Represent many ranks of a pipeline by one recorded rank that does the same work on other layers.

Ranks with the same number of layers, and the same embedding and loss, differ only in the order of
their actions. The memory of an action depends on its neighbors, not on the pipeline's length. So
one rank of each kind is recorded, in a shorter pipeline if there are many ranks, and its actions
are reordered to the schedule of each rank that it represents.

    pipeline   Et  tt  tt  tt  tt  tt  tt  tL      E embedding, t layer, L loss
    recorded   Et  tt                 (tt) tL      the rank in brackets is built, not recorded
    like        0   1   1   1   1   1   1   3      place of the representing rank
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from forecast.moments import Place
from mpu.pipeline.schedules import V_SHAPED, Action, Schedule, stage_of
from mpu.pipeline.stage_layout import Stage
from mpu.pipeline.steps import Step, plan
from training.run.model_profile import ModelProvider, model_profile
from training.run.pipeline_stages import rank_stages
from training.settings.config import Config
from training.settings.pipeline_schedule import micro_batch_counts

BEHIND = 2  # least number of ranks behind a middle one, so that it has an F between two others


class Like(NamedTuple):
    """The pipeline to record, and for each rank of the run's pipeline its place in that one."""

    config: Config
    places: tuple[int, ...]


ALONE = -1  # in place of a chunk: no F overlaps the action


class Turn(NamedTuple):
    """An action and its neighbors among the actions of its rank."""

    name: tuple[str | int, ...]  # kind, chunk, and the chunk of an F that overlaps it or ALONE
    before: tuple[str | int, ...]  # name of the previous action
    after: tuple[str | int, ...]  # name of the next action
    begun: int  # micro-batches before its own, at most 2
    left: int  # micro-batches after its own, at most 1
    receives: int  # receives for later actions, posted as it ends


def like_ranks(config: Config, provider: ModelProvider, layers: int = 0) -> Like:
    """Return the pipeline to record for all ranks of a run's pipeline.

    It is the run's own if layers differ, or with --defer-embedding-wgrad-compute. layers: layers of
    each stage to record; 0: as many as the run's stages have.
    """
    p = config.parallel
    size = p.pipeline_model_parallel_size
    stages = [rank_stages(config, provider, rank) for rank in range(size)]
    if layers:
        stages = [tuple(replace(s, first=0, last=layers) for s in own) for own in stages]
    elif size == 1 or not alike(config, provider) or p.defer_embedding_wgrad_compute:
        return Like(config, tuple(range(size)))
    kinds = [tuple((len(s.layers), s.embedding, s.loss) for s in own) for own in stages]
    if p.schedule in V_SHAPED:  # the last rank's first chunk feeds its second
        kinds[-1] = (*kinds[-1], (0, False, False))
    first = {kind: rank for rank, kind in reversed([*enumerate(kinds)])}
    ends = [size - 1] * (kinds.count(kinds[-1]) == 1 < size)
    middle = sorted(set(first.values()) - {0, *ends})
    short = [0, *middle, *middle[-1:] * (BEHIND - len(ends)), *ends]
    if len(short) >= size:
        short, places = [*range(size)], tuple(first[kind] for kind in kinds)
    else:
        place = {kinds[rank]: n for n, rank in reversed([*enumerate(short)])}
        places = tuple(place[kind] for kind in kinds)
    if len(short) == size and not layers:
        return Like(config, places)
    return Like(_pipeline(config, [stages[rank] for rank in short]), places)


def alike(config: Config, provider: ModelProvider) -> bool:
    """Return whether all layers of a run's model are equal, including how they are updated."""
    return not config.optimizer.param_group and model_profile(config, provider).alike


def shortened(
    config: Config, micro_batches: int, layers: int = 0, ranks: int = 1, chunks: int = 1,
    again: int = 0, bucket: int | None = None,
) -> Config:  # fmt: skip
    """Return the config of a step of `micro_batches`, in a pipeline of `ranks` ranks of `chunks`
    stages of `layers` layers each; layers 0: in the run's own pipeline.

    again: layers of a stage that are recomputed, 0: as in the run. bucket: elements of a bucket.
    """
    if layers:
        v_shape = config.parallel.schedule in V_SHAPED
        last = ranks * chunks - 1
        places = [[stage_of(rank, chunk, ranks, v_shape) for chunk in range(chunks)]
                  for rank in range(ranks)]  # fmt: skip
        config = _pipeline(
            config, [[Stage(0, layers, n == 0, n == last) for n in own] for own in places]
        )
        number = again or config.parallel.recompute_num_layers
        parallel = replace(config.parallel, recompute_num_layers=number, ddp_bucket_size=bucket)
        config = replace(config, parallel=parallel)
    samples = micro_batches * config.batch.micro_batch_size * config.parallel.data_parallel_size
    batch = replace(config.batch, global_batch_size=samples, step_batch_size_schedule=None)
    return replace(config, batch=batch)


def _pipeline(config: Config, ranks: Sequence[Sequence[Stage]]) -> Config:
    """Return the config of a pipeline of these ranks.

    It has as many micro-batches as the run, rounded down to what an interleaved schedule can run.
    """
    p, size = config.parallel, len(ranks)
    v_shape = p.schedule in V_SHAPED
    of_stage = {stage_of(rank, chunk, size, v_shape): stage
                for rank, own in enumerate(ranks) for chunk, stage in enumerate(own)}  # fmt: skip
    texts = ["E" * s.embedding + "t" * len(s.layers) + "L" * s.loss
             for _, s in sorted(of_stage.items())]  # fmt: skip
    layers = sum(len(s.layers) for s in of_stage.values())
    parallel = replace(
        p, pipeline_model_parallel_size=size,
        pipeline_model_parallel_layout="|".join(texts) if size > 1 else None,
        world_size=p.world_size // p.pipeline_model_parallel_size * size,
        num_virtual_stages_per_pipeline_rank=len(ranks[0]),
        microbatch_group_size_per_virtual_pipeline_stage=None,
    )  # fmt: skip
    count = max(micro_batch_counts(config))
    count -= count % size if p.schedule == "interleaved" else 0
    samples = count * config.batch.micro_batch_size * p.data_parallel_size
    return replace(
        config, parallel=parallel, model=replace(config.model, num_layers=layers),
        batch=replace(config.batch, global_batch_size=samples, step_batch_size_schedule=None),
    )  # fmt: skip


def turns(steps: Sequence[Step], split: bool) -> list[tuple[Action, Turn]]:
    """Return a rank's actions in order, as recorded: an F that overlaps a B is part of that B.

    split: whether the schedule separates W from B; if not, a W is part of the B before it.
    """
    names: list[tuple[Action, tuple[str | int, ...]]] = []
    receives, beside = list[int](), ALONE
    for step in steps:
        action = step.action
        if receives:
            receives[-1] += len(step.receives)
        if step.overlapped:
            beside = action.chunk
        elif action.kind != "W" or split:
            names.append((action, (action.kind, action.chunk, beside)))
            receives.append(0)
            beside = ALONE
    last = max(action.micro_batch for action, _ in names)
    none: tuple[str | int, ...] = ()
    around = [none, *(name for _, name in names), none]
    return [
        (action, Turn(name, around[n], around[n + 2], min(action.micro_batch, 2),
                      min(last - action.micro_batch, 1), receives[n]))
        for n, (action, name) in enumerate(names)
    ]  # fmt: skip


def followed(schedule: Schedule, recorded: Schedule, places: Sequence[int]) -> list[list[Place]]:
    """Return each rank's actions in order, each with the most similar recorded action.

    places: for each rank, the place in `recorded` of the rank that represents it.
    """
    whole, few = plan(schedule), plan(recorded)
    by_chunk: dict[int, dict[tuple[str | int, ...], list[tuple[Turn, int]]]] = {}
    for place in {*places}:
        chunks = by_chunk[place] = defaultdict(list)
        for n, (_, turn) in enumerate(turns(few[place], recorded.split)):
            chunks[turn.name[:2]].append((turn, n))
    known: dict[tuple[int, Turn], tuple[Turn, int]] = {}
    found = []
    for steps, place in zip(whole, places, strict=True):
        order = []
        for action, turn in turns(steps, schedule.split):
            if (place, turn) not in known:
                others = by_chunk[place][turn.name[:2]]
                known[place, turn] = max(others, key=lambda other: _likeness(turn, other[0]))
            like, n = known[place, turn]
            order.append(Place(action, n, turn.receives - like.receives))
        found.append(order)
    return found


def _likeness(one: Turn, other: Turn) -> tuple[int, int, int, int]:
    name, before, after, begun, left, receives = (
        a == b for a, b in zip(one, other, strict=True)
    )
    beside = name + ((one.name[2] == ALONE) == (other.name[2] == ALONE))
    return beside, begun + left, before + after, receives
