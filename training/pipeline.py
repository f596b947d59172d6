# SPDX-License-Identifier: Apache-2.0
"""Turn the flags into pipeline stages and a schedule, and say what they cost: no model, no ranks.

p pipeline ranks, v virtual stages a rank, m micro-batches a step
"""

from dataclasses import replace
from typing import Any

from mpu.pipeline import layout, schedules
from mpu.pipeline.layout import Stage
from mpu.pipeline.schedules import Schedule
from training import batch_schedule
from training.config import V_SHAPED, Config, ModelConfig, ParallelConfig, UsageError

LAYOUT = "--pipeline-model-parallel-layout"
SIZE = "--pipeline-model-parallel-size"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
# What cuts the layers otherwise than by the automatic balance.
CUTS = (
    LAYOUT,
    PER_STAGE,
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


def layer_flops(model: ModelConfig) -> float:
    """Count the forward FLOPs of one layer, a token: its matmuls, and causal attention's two."""
    m = model
    heads = 2 * m.num_attention_heads + 2 * m.num_query_groups
    weights = m.hidden_size * (m.kv_channels * heads + 3 * m.ffn_hidden_size)
    return 2.0 * weights + 2.0 * m.seq_length * m.num_attention_heads * m.kv_channels


def head_flops(model: ModelConfig) -> float:
    """Count the forward FLOPs of the output layer, a token."""
    if model.vocab_size is None:
        raise ValueError("the vocabulary size is not known before the tokenizer is read")
    return 2.0 * model.hidden_size * model.vocab_size


def stages_of(config: Config) -> tuple[Stage, ...]:
    """Return the p v stages in order.

    Raises UsageError naming the flag by which the layers do not add up.
    """
    p, head_cost = config.parallel, head_flops(config.model)
    try:
        return layout.stages(
            config.model.num_layers,
            p.pipeline_model_parallel_size,
            p.virtual_stages,
            p.schedule in V_SHAPED,
            layer_cost=layer_flops(config.model),
            head_cost=head_cost,
            even=p.num_layers_per_virtual_pipeline_stage is not None,
            count_embedding=p.account_for_embedding_in_pipeline_split,
            count_loss=p.account_for_loss_in_pipeline_split,
            first_rank=p.decoder_first_pipeline_num_layers,
            last_rank=p.decoder_last_pipeline_num_layers,
            layout=p.pipeline_model_parallel_layout,
        )
    except ValueError as error:
        raise UsageError(f"{_cut_by(p)}: {error}") from None


def rank_stages(config: Config, pp_rank: int) -> tuple[Stage, ...]:
    """Return what a pipeline rank holds, in the order of its chunks."""
    p = config.parallel
    cut, size, v_shape = stages_of(config), p.pipeline_model_parallel_size, p.schedule in V_SHAPED
    return tuple(
        cut[schedules.stage_of(pp_rank, chunk, size, v_shape)] for chunk in range(p.virtual_stages)
    )


def schedule_of(config: Config, micro_batches: int) -> Schedule:
    """Return what every rank does in a step of so many micro-batches.

    Raises UsageError where the schedule has no such form.
    """
    p = config.parallel
    try:
        return schedules.build(
            p.schedule,
            p.pipeline_model_parallel_size,
            micro_batches,
            p.virtual_stages,
            p.microbatch_group_size_per_virtual_pipeline_stage,
        )
    except ValueError as error:
        raise UsageError(f"--pipeline-schedule {p.schedule}: {error}") from None


def virtual_stages(parallel: dict[str, Any], num_layers: int) -> int | None:
    """Work out v from the flags of the layout, or None where they leave it open.

    Raises UsageError where a layout does not divide over the ranks.
    """
    p = parallel.get("pipeline_model_parallel_size", 1)
    written = parallel.get("pipeline_model_parallel_layout")
    if written is not None:
        try:
            count = len(layout.read_layout(written))
        except ValueError as error:
            raise UsageError(f"{LAYOUT} {written}: {error}") from None
        if count % p:
            raise UsageError(f"{LAYOUT} {written}: {count} stages are not a multiple of {SIZE} {p}")
        return count // p
    each = parallel.get("num_layers_per_virtual_pipeline_stage")
    if each is not None:
        things = [f"--num-layers {num_layers}"]
        for end in ("embedding", "loss"):
            if parallel.get(f"account_for_{end}_in_pipeline_split"):
                things.append(f"the {end}")
        total = num_layers + len(things) - 1
        if total % (p * each):
            raise UsageError(
                f"{PER_STAGE} {each}: {' and '.join(things)} do not divide over {SIZE} {p} ranks "
                f"in stages of {each}"
            )
        return total // (p * each)
    return None


def micro_batch_counts(config: Config) -> list[int]:
    """List every number of micro-batches that a step of the run takes; an evaluation's is one."""
    one = config.batch.micro_batch_size * config.parallel.data_parallel_size
    return sorted({size // one for _, size in batch_schedule.schedule(config)})


def check(config: Config) -> None:
    """Refuse a cut or a schedule that does not work out, at any batch size of the run."""
    if config.model.vocab_size is None:  # what the head costs moves layers, it refuses none
        config = replace(config, model=replace(config.model, vocab_size=1))
    stages_of(config)
    for count in micro_batch_counts(config):
        schedule_of(config, count)


def _cut_by(p: ParallelConfig) -> str:
    """Name the flags that the cut follows, with their values."""
    given = []
    for flag in CUTS:
        value = getattr(p, flag[2:].replace("-", "_"))
        if value not in (None, False):
            given.append(flag if value is True else f"{flag} {value}")
    return " ".join(given or [f"{SIZE} {p.pipeline_model_parallel_size}"])
