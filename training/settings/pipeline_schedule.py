# SPDX-License-Identifier: Apache-2.0
"""Compute a pipeline's stages and schedule from the flags, without a model.

p pipeline ranks, v virtual stages per rank, m micro-batches per step
"""

from dataclasses import replace
from typing import Any

from mpu.pipeline import schedules, stage_layout
from mpu.pipeline.schedules import CHUNKS, SPLIT, V_SHAPED, Schedule
from mpu.pipeline.stage_layout import Stage
from training.settings import batch_size
from training.settings.arguments import ParallelConfig
from training.settings.config import Config, UsageError

LAYOUT = "--pipeline-model-parallel-layout"
SIZE = "--pipeline-model-parallel-size"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


def cut(
    config: Config, embedding: float, layers: tuple[float, ...], head: float
) -> tuple[Stage, ...]:
    """Return the p v stages for the costs of the embedding, each layer and the head.

    Raises UsageError naming the flags with which the layers do not add up.
    """
    p = config.parallel
    try:
        return stage_layout.stages(
            layers,
            p.pipeline_model_parallel_size,
            p.virtual_stages,
            p.schedule in V_SHAPED,
            embedding_cost=embedding,
            head_cost=head,
            layout=p.pipeline_model_parallel_layout,
        )
    except ValueError as error:
        raise UsageError(f"{_cut_by(p)}: {error}") from None


def own_stages(config: Config, pp_rank: int) -> list[int]:
    """Return the numbers of a pipeline rank's stages, in the order of its chunks."""
    p = config.parallel
    size, v_shape = p.pipeline_model_parallel_size, p.schedule in V_SHAPED
    chunks = range(p.virtual_stages)
    return [schedules.stage_of(pp_rank, chunk, size, v_shape) for chunk in chunks]


def schedule_of(config: Config, micro_batches: int) -> Schedule:
    """Return the schedule of a step of `micro_batches` micro-batches.

    Raises UsageError if --pipeline-schedule cannot run that many.
    """
    p, one = config.parallel, config.batch.micro_batch_size
    try:
        schedule = schedules.build(
            p.schedule,
            p.pipeline_model_parallel_size,
            micro_batches,
            p.virtual_stages,
            p.microbatch_group_size_per_virtual_pipeline_stage,
            p.overlap_moe_expert_parallel_comm,
        )
    except ValueError as error:
        dp = p.data_parallel_size
        raise UsageError(
            f"--pipeline-schedule {p.schedule} at --global-batch-size {micro_batches * one * dp} = "
            f"{micro_batches} micro-batches of {one} x {dp} data-parallel ranks: {error}"
        ) from None
    if p.defers_output_layer:
        schedule = replace(schedule, deferred=True)
    return schedule


def head_again(config: Config) -> tuple[bool, bool]:
    """Return whether B, and whether W, recomputes the logits (--fused-linear-cross-entropy)."""
    p = config.parallel
    waits = p.defer_embedding_wgrad_compute or p.schedule in SPLIT
    return p.fused_linear_cross_entropy, p.fused_linear_cross_entropy and waits


def recomputed_layers(config: Config, stage: Stage) -> int:
    """Return the number of layers of a stage that backward recomputes as a whole."""
    p, layers = config.parallel, len(stage.layers)
    if p.recompute_granularity != "full":
        return 0
    return layers if p.recompute_method == "uniform" else min(layers, p.recompute_num_layers or 1)


def virtual_stages(given: dict[str, Any], num_layers: int) -> int | None:
    """Return v if a layout or a number of layers per stage determines it, else None.

    given: {flag: value}. Raises UsageError if the layers or stages do not divide.
    """
    p = given.get(SIZE, 1)
    written, each = given.get(LAYOUT), given.get(PER_STAGE)
    if written is not None:
        try:
            stages = len(stage_layout.read_layout(written))
        except ValueError as error:
            raise UsageError(f"{LAYOUT} {written}: {error}") from None
        if stages % p:
            raise UsageError(
                f"{LAYOUT} {written}: its {stages} stages are not a multiple of {SIZE} {p}"
            )
        stated = given.get(VIRTUAL, stages // p)
        if stated != stages // p:
            raise UsageError(
                f"{VIRTUAL} {stated}: {LAYOUT} {written} has {stages} stages, {stages // p} a rank"
            )
        return stages // p
    if each is not None:
        counted = "--account-for-{}-in-pipeline-split"  # of Megatron-LM
        ends = [e for e in ("embedding", "loss") if counted.format(e) in given]
        total = num_layers + len(ends)
        if total % (p * each):
            parts = " and ".join([f"--num-layers {num_layers}", *(f"the {e}" for e in ends)])
            raise UsageError(
                f"{PER_STAGE} {each}: {parts} are not a multiple of {each} x {SIZE} {p}"
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
            f"--pipeline-schedule interleaved needs virtual stages: give {VIRTUAL} of at least 2"
        )
    if p.defer_embedding_wgrad_compute and size == 1:
        raise UsageError(
            f"--defer-embedding-wgrad-compute fills a pipeline's bubble: it needs {SIZE} of at "
            "least 2"
        )
    chunks = v if p.schedule == "interleaved" else CHUNKS[p.schedule]
    if v != chunks:
        raise UsageError(
            f"--pipeline-schedule {p.schedule} needs {chunks} virtual stage{'s' * (chunks > 1)} on "
            f"each rank: {source} gives {v}"
        )
    group = p.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and (p.schedule != "interleaved" or v == 1):
        raise UsageError(
            f"{GROUP} {group} needs --pipeline-schedule interleaved and {VIRTUAL} of at least 2"
        )
    cut(config, 0.0, (1.0,) * config.model.num_layers, 0.0)  # no cost makes a cut impossible
    for count in micro_batch_counts(config):
        schedule_of(config, count)


def _gives_v(p: ParallelConfig) -> str:
    """Return the flag, with its value, that gives the number of virtual stages."""
    for flag in (LAYOUT, VIRTUAL):
        value = getattr(p, flag[2:].replace("-", "_"))
        if value is not None:
            return f"{flag} {value}"
    return f"--pipeline-schedule {p.schedule}"


def _cut_by(p: ParallelConfig) -> str:
    """Return the flags, with their values, by which the layers are cut."""
    size, written = f"{SIZE} {p.pipeline_model_parallel_size}", p.pipeline_model_parallel_layout
    return size if written is None else f"{size} and {LAYOUT} {written}"
