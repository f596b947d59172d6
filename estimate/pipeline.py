# SPDX-License-Identifier: Apache-2.0
"""Turn the flags into pipeline stages and a schedule, and compute their cost, without ranks.

p pipeline ranks, v virtual stages a rank, m micro-batches a step
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from estimate.model_profile import ModelProvider, model_profile
from mpu.pipeline import layout, schedules
from mpu.pipeline.layout import Stage
from mpu.pipeline.schedules import CHUNKS, V_SHAPED, Schedule
from mpu.pipeline.simulate import Costs, simulate
from training import batch_size
from training.config import Config, ParallelConfig, UsageError

LAYOUT = "--pipeline-model-parallel-layout"
SIZE = "--pipeline-model-parallel-size"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
SPLIT = "in_pipeline_split"
# Flags that replace the automatic balance of the layers.
CUTS = (
    LAYOUT,
    PER_STAGE,
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


def stages_of(config: Config, provider: ModelProvider) -> tuple[Stage, ...]:
    """Return the p v stages in order, by default balanced by the cost of the model's parts.

    Raises UsageError naming the flags with which the layers do not add up.
    """
    layers = config.model.num_layers
    if config.parallel.pipeline_model_parallel_size == 1:  # nothing to balance
        return _cut(config, 0.0, (1.0,) * layers, 0.0)
    model = model_profile(config, provider)
    more = sum(head_again(config)) / 3  # a part's cost stands for forward, dgrad and wgrad
    return _cut(config, model.embedding, model.layers, model.head * (1 + more))


def _cut(
    config: Config, embedding: float, layers: tuple[float, ...], head: float
) -> tuple[Stage, ...]:
    """Return the p v stages for the costs of the embedding, each layer and the head."""
    p = config.parallel
    try:
        return layout.stages(
            layers,
            p.pipeline_model_parallel_size,
            p.virtual_stages,
            p.schedule in V_SHAPED,
            embedding_cost=embedding,
            head_cost=head,
            even=p.num_layers_per_virtual_pipeline_stage is not None,
            count_embedding=p.account_for_embedding_in_pipeline_split,
            count_loss=p.account_for_loss_in_pipeline_split,
            first_rank=p.decoder_first_pipeline_num_layers,
            last_rank=p.decoder_last_pipeline_num_layers,
            layout=p.pipeline_model_parallel_layout,
        )
    except ValueError as error:
        raise UsageError(f"{_cut_by(p)}: {error}") from None


def rank_stages(config: Config, provider: ModelProvider, pp_rank: int) -> tuple[Stage, ...]:
    """Return the stages of a pipeline rank, in the order of its chunks."""
    cut = stages_of(config, provider)
    return tuple(cut[stage] for stage in own_stages(config, pp_rank))


def own_stages(config: Config, pp_rank: int) -> list[int]:
    """Return the numbers of a pipeline rank's stages, in the order of its chunks."""
    p = config.parallel
    size, v_shape = p.pipeline_model_parallel_size, p.schedule in V_SHAPED
    chunks = range(p.virtual_stages)
    return [schedules.stage_of(pp_rank, chunk, size, v_shape) for chunk in chunks]


def schedule_of(config: Config, micro_batches: int) -> Schedule:
    """Return the schedule of a step of so many micro-batches.

    Raises UsageError where --pipeline-schedule cannot run that many.
    """
    p, one = config.parallel, config.batch.micro_batch_size
    try:
        schedule = schedules.build(
            p.schedule,
            p.pipeline_model_parallel_size,
            micro_batches,
            p.virtual_stages,
            p.microbatch_group_size_per_virtual_pipeline_stage,
        )
    except ValueError as error:
        dp = p.data_parallel_size
        raise UsageError(
            f"--pipeline-schedule {p.schedule} at --global-batch-size {micro_batches * one * dp} = "
            f"{micro_batches} micro-batches of {one} x {dp} data-parallel ranks: {error}"
        ) from None
    if p.defer_embedding_wgrad_compute and not schedule.split:  # a split one defers all W's
        limit = p.wgrad_deferral_limit or micro_batches
        schedule = replace(schedule, deferred=min(limit, micro_batches))
    return schedule


def head_again(config: Config) -> tuple[bool, bool]:
    """Return whether B, and whether W, computes the logits again (--fused-linear-cross-entropy)."""
    p = config.parallel
    waits = p.defer_embedding_wgrad_compute or p.schedule in ("zb-h1", *V_SHAPED)
    return p.fused_linear_cross_entropy, p.fused_linear_cross_entropy and waits


def recomputed_layers(config: Config, stage: Stage) -> int:
    """Return the number of layers of a stage that backward recomputes as a whole."""
    p, layers = config.parallel, len(stage.layers)
    if p.recompute_granularity != "full":
        return 0
    return layers if p.recompute_method == "uniform" else min(layers, p.recompute_num_layers or 1)


def costs(config: Config, provider: ModelProvider) -> Costs:
    """Return the FLOPs a token of every stage: F = B = W, plus what B and W compute again."""
    model, cut = model_profile(config, provider), stages_of(config, provider)
    forward = [
        sum(model.layers[s.first : s.last]) + s.loss * model.head + s.embedding * model.embedding
        for s in cut
    ]
    again = [sum(model.layers[s.first :][: recomputed_layers(config, s)]) for s in cut]
    if config.parallel.recompute_granularity == "selective":
        again = [sum(model.core[s.first : s.last]) for s in cut]
    in_b, in_w = ([s.loss * part * model.head for s in cut] for part in head_again(config))
    b = [sum(each) for each in zip(forward, again, in_b, strict=True)]
    return Costs(forward, b, [f + w for f, w in zip(forward, in_w, strict=True)])


def messages(config: Config, pp_rank: int) -> int:
    """Return a pipeline rank's sends for one micro-batch: activations on, gradients back."""
    own, p = own_stages(config, pp_rank), config.parallel
    last = p.pipeline_model_parallel_size * p.virtual_stages - 1
    return sum(0 <= to <= last and to not in own for s in own for to in (s - 1, s + 1))


def lines(config: Config, provider: ModelProvider) -> list[str]:
    """Return lines on what each pipeline rank holds and how long it waits; rank 0 prints them."""
    p = config.parallel
    size, v = p.pipeline_model_parallel_size, p.virtual_stages
    if size == 1:
        return []
    cost = costs(config, provider)
    parts = (cost.forward, cost.input_gradient, cost.weight_gradient)
    own = [own_stages(config, rank) for rank in range(size)]
    work = [sum(part[s] for part in parts for s in stages) for stages in own]
    more = 100 * (max(work) * size / sum(work) - 1)
    stages = f", {v} stages each" if v > 1 else ""
    out = [
        f"pipeline {p.schedule}: {size} ranks{stages}; the slowest does {more:.1f} % more than "
        "the mean"
    ]
    held = [rank_stages(config, provider, rank) for rank in range(size)]
    out += [f"pipeline rank {rank}: {describe_stages(stages)}" for rank, stages in enumerate(held)]
    for count in micro_batch_counts(config):
        waits = simulate(schedule_of(config, count), cost)
        ideal = simulate(schedule_of(config, count), even(cost))
        out.append(
            f"{count} micro-batches: bubble {100 * waits.bubble / waits.step:.2f} % of a step, "
            f"{100 * ideal.bubble / ideal.step:.2f} % were all stages equal"
        )
    return out


def describe_stages(stages: Sequence[Stage]) -> str:
    """Return what a rank holds as text: "embedding + layers 0-1 | layers 8-9"."""
    return " | ".join(_told(stage) for stage in stages)


def _told(stage: Stage) -> str:
    parts = ["embedding"] * stage.embedding
    if len(stage.layers) == 1:
        parts.append(f"layer {stage.first}")
    elif stage.layers:
        parts.append(f"layers {stage.first}-{stage.last - 1}")
    return " + ".join(parts + ["head"] * stage.loss) or "nothing"


def even(cost: Costs) -> Costs:
    """Return the costs of stages that share the same work equally."""

    def share(part: Sequence[float]) -> list[float]:
        return [sum(part) / len(part)] * len(part)

    return Costs(share(cost.forward), share(cost.input_gradient), share(cost.weight_gradient))


def virtual_stages(parallel: dict[str, Any], num_layers: int) -> int | None:
    """Return v where a layout or a number of layers a stage gives it; else None.

    parallel: {field: value} of the flags given. Raises UsageError where they do not divide.
    """
    p = parallel.get("pipeline_model_parallel_size", 1)
    written = parallel.get("pipeline_model_parallel_layout")
    each = parallel.get("num_layers_per_virtual_pipeline_stage")
    if written is not None:
        try:
            stages = len(layout.read_layout(written))
        except ValueError as error:
            raise UsageError(f"{LAYOUT} {written}: {error}") from None
        if stages % p:
            raise UsageError(
                f"{LAYOUT} {written}: stages must be a multiple of {SIZE} {p}; it has {stages}"
            )
        stated = parallel.get("num_virtual_stages_per_pipeline_rank", stages // p)
        if stated != stages // p:
            raise UsageError(
                f"{VIRTUAL} {stated}: {LAYOUT} {written} has {stages} stages, {stages // p} a rank"
            )
        return stages // p
    if each is not None:
        ends = [e for e in ("embedding", "loss") if parallel.get(f"account_for_{e}_{SPLIT}")]
        total = num_layers + len(ends)
        if total % (p * each):
            counted = " and ".join([f"--num-layers {num_layers}", *(f"the {e}" for e in ends)])
            raise UsageError(
                f"{PER_STAGE} {each}: {counted} are not a multiple of {each} x {SIZE} {p}"
            )
        return total // (p * each)
    return None


def micro_batch_counts(config: Config) -> list[int]:
    """Return every number of micro-batches that a step, or an evaluation, of the run takes."""
    one = config.batch.micro_batch_size * config.parallel.data_parallel_size
    return sorted({size // one for _, size in batch_size.schedule(config)})


def check(config: Config) -> None:
    """Raise UsageError unless cut and schedule are possible at every batch size of the run."""
    p = config.parallel
    size, v = p.pipeline_model_parallel_size, p.virtual_stages
    source = _gives_v(p)
    if v > 1 and size == 1:
        raise UsageError(f"{source}: {v} virtual stages need a pipeline, {SIZE} of at least 2")
    if p.schedule == "interleaved" and v == 1:
        raise UsageError(
            f"--pipeline-schedule interleaved needs {VIRTUAL} of at least 2, or another flag for v"
        )
    if p.defer_embedding_wgrad_compute and size == 1:
        raise UsageError(
            f"--defer-embedding-wgrad-compute fills a pipeline's bubble: it needs {SIZE} of at "
            "least 2"
        )
    chunks = v if p.schedule == "interleaved" else CHUNKS[p.schedule]
    if v != chunks:
        raise UsageError(
            f"--pipeline-schedule {p.schedule} has {chunks} virtual stage{'s' * (chunks > 1)} a "
            f"rank: {source} gives {v}"
        )
    group = p.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and (p.schedule != "interleaved" or v == 1):
        raise UsageError(
            f"{GROUP} {group} needs --pipeline-schedule interleaved and {VIRTUAL} of at least 2"
        )
    _cut(config, 0.0, (1.0,) * config.model.num_layers, 0.0)  # no cost makes a cut impossible
    for count in micro_batch_counts(config):
        schedule_of(config, count)


def _gives_v(p: ParallelConfig) -> str:
    """Return the flag, with its value, that gives the number of virtual stages."""
    for flag in (LAYOUT, PER_STAGE, VIRTUAL):
        value = getattr(p, flag[2:].replace("-", "_"))
        if value is not None:
            return f"{flag} {value}"
    return f"--pipeline-schedule {p.schedule}"


def _cut_by(p: ParallelConfig) -> str:
    """Return the flags, with their values, by which the layers are cut."""
    given = [f"{SIZE} {p.pipeline_model_parallel_size}"]
    for flag in CUTS:
        value = getattr(p, flag[2:].replace("-", "_"))
        if value not in (None, False):
            given.append(flag if value is True else f"{flag} {value}")
    return " and ".join(given)
