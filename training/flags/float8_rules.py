# SPDX-License-Identifier: Apache-2.0
"""Check the flags of float8 against each other, against the sizes and against the layout."""

from collections.abc import Iterator

import torch

from mpu.layers.float8.rows import ALIGN, BLOCKS
from training.config import Config, UsageError
from training.flags import zero_rules

# Megatron-LM's other recipes, and the way round
ELSEWHERE = {
    "delayed": "scales of earlier steps are not kept here; take tensorwise, which scales each "
    "tensor by its own largest number",
    "custom": "a recipe of your own is a Recipe (mpu/layers/linear.py), which a layer of your "
    "--model-file takes as recipe=",
}


def check(config: Config) -> None:
    """Raise UsageError for a recipe that is not here, or that this layout cannot take."""
    f, m = config.float8, config.model
    if f.fp8_format is None:
        return
    recipe = f.fp8_recipe
    if recipe is None:
        raise UsageError(
            f"--fp8-format {f.fp8_format} needs --fp8-recipe ({', '.join(BLOCKS)}): Megatron-LM's "
            "default, delayed, is not here; tensorwise is the nearest to it"
        )
    if recipe not in BLOCKS:
        why = f"; {ELSEWHERE[recipe]}" if recipe in ELSEWHERE else ""
        raise UsageError(f"--fp8-recipe {recipe}: must be one of {', '.join(BLOCKS)}{why}")
    if config.run.dtype != torch.bfloat16 and not zero_rules.on_cpu(config):
        raise UsageError(f"--fp8-format {f.fp8_format} needs --bf16, or --device cpu")
    if f.fp8_auto and config.rehearse.rehearse:
        raise UsageError(
            "--fp8-auto measures on the device, and --rehearse has none: leave --fp8-auto out to "
            "rehearse every projection in float8"
        )
    if f.fp8_param_gather:
        _check_gather(config)
    at_start, at_end = f.num_layers_at_start_in_bf16, f.num_layers_at_end_in_bf16
    if f.first_last_layers_bf16 and at_start + at_end >= m.num_layers:
        raise UsageError(
            f"--num-layers-at-start-in-bf16 {at_start} and --num-layers-at-end-in-bf16 {at_end} "
            f"leave none of --num-layers {m.num_layers} in float8: leave --fp8-format out"
        )
    unit = BLOCKS[recipe] or ALIGN
    for what, size in _sizes(config):
        if size % unit:
            raise UsageError(
                f"--fp8-recipe {recipe}: {what} is {size}, which is not a multiple of {unit}"
            )


def _check_gather(config: Config) -> None:
    """Raise UsageError where weights cannot be gathered in float8."""
    flag, p = "--fp8-param-gather", config.parallel
    if not p.zero:
        raise UsageError(
            f"{flag} needs --zero-stage 1, 2 or 3 (--use-distributed-optimizer is 1): at 0 every "
            "rank updates all weights, and gathers none"
        )
    if config.float8.fp8_auto:
        raise UsageError(
            f"{flag} and --fp8-auto exclude each other: buckets are laid out before "
            "projections are measured"
        )


def _sizes(config: Config) -> Iterator[tuple[str, int]]:
    """Yield what rows are made of on a rank: the k of each product."""
    m, t = config.model, config.parallel.tensor_model_parallel_size
    cut = f"over --tensor-model-parallel-size {t}" if t > 1 else "in all"
    yield f"--hidden-size {m.hidden_size}", m.hidden_size
    yield f"--ffn-hidden-size {m.ffn_hidden_size} {cut}", m.ffn_hidden_size // t
    heads = (("--num-attention-heads", m.num_attention_heads),
             ("--num-query-groups", m.num_query_groups))  # fmt: skip
    for flag, count in heads:
        yield f"{flag} {count} x --kv-channels {m.kv_channels} {cut}", count * m.kv_channels // t
    b, s = config.batch.micro_batch_size, m.seq_length
    cp = config.parallel.context_parallel_size
    if cp == 1:
        yield f"--micro-batch-size {b} x --seq-length {s}", b * s
    else:
        # a rank holds two chunks of a row; a block of tokens must lie in one, as on one rank
        parts = 2 * cp if BLOCKS[config.float8.fp8_recipe or ""] else cp
        times = "2 x " if parts > cp else ""
        what = f"--micro-batch-size {b} x --seq-length {s} / ({times}--context-parallel-size {cp})"
        yield what, b * s // parts
