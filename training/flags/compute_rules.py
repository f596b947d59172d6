# SPDX-License-Identifier: Apache-2.0
"""Check the flags of a rank's computation: kernels, float8, recomputed or offloaded activations."""

from collections.abc import Iterator
from math import ceil

import torch

from mpu.layers.attention.backends import (
    FLAG,
    Card,
    Work,
    describe,
    kernel_of,
    why_no_length,
)
from mpu.layers.float8.rows import ALIGN, BLOCKS, RECIPES
from mpu.pipeline.stage_layout import read_layout
from training.flags import parallel_rules
from training.settings.config import Config, UsageError

OFFLOAD = "--cpu-offload-activations"
# {recipe that only Megatron-LM has: the alternative here}
ELSEWHERE = {
    "custom": "a recipe of your own is a Recipe (mpu/layers/linear.py), which a layer of your "
    "--model-file takes as recipe=",
}


# the most capable GPU: a kernel that it cannot run runs on no GPU
ANY_GPU = Card("cuda", 9, 0, cudnn=99999)


def check_kernels(config: Config) -> None:
    """Raise UsageError if the run cannot use the kernels that flags name, installed or not."""
    p = config.parallel
    te = "te" if p.attention_backend == "te" else "auto"
    for flag, name, own in (("--norm-backend", p.norm_backend, "weft"), (FLAG, te, "auto")):
        if name == own:
            continue
        if config.run.dtype == torch.float64:
            raise UsageError(f"{flag} {name} has no fp64: with --fp64 use {own}")
        if config.rehearse.rehearse:
            raise UsageError(
                f"{flag} {name} runs kernels of another package, which --rehearse cannot simulate: "
                f"rehearse with {own}"
            )
    if config.rehearse.rehearse or not parallel_rules.on_cpu(config):
        attention_line(config, ANY_GPU._replace(deterministic=config.run.deterministic_mode))


def attention_works(config: Config) -> tuple[Work, ...]:
    """Return the kinds of attention work in a run's steps."""
    if config.data.reset_attention_mask:
        return ("documents",)
    return ("blocks",) if exchanges_blocks(config) else ("rows",)


def exchanges_blocks(config: Config) -> bool:
    """Return whether context-parallel ranks attend to each other's keys block by block."""
    p = config.parallel
    alone = p.context_parallel_size == 1 or p.cp_comm_type == "a2a"
    return not alone and p.attention_backend != "te"


def attention_line(config: Config, card: Card) -> str:
    """Return a line on the attention kernels that the run uses on a device.

    Raises UsageError if the kernel that --attention-backend names does not support the run.
    """
    requested, size = config.parallel.attention_backend, config.model.kv_channels
    works, dtype = attention_works(config), config.run.dtype
    try:
        line = describe(requested, card, dtype, size, works)
        for work in works:
            length = config.model.seq_length
            if work == "blocks":  # a rank has two chunks of a row
                length //= 2 * config.parallel.context_parallel_size
            if kernel_of(requested, card, dtype, size, work) == "cudnn":
                if why := why_no_length(card, length):
                    raise ValueError(f"{FLAG} {requested}: {why}")
    except ValueError as error:
        raise UsageError(str(error)) from None
    return line


def attention_notes(config: Config) -> Iterator[str]:
    """Yield lines on an --attention-backend that the device lacks, or that needs more memory."""
    requested = config.parallel.attention_backend
    on_cpu = not config.rehearse.rehearse and parallel_rules.on_cpu(config)
    if on_cpu and requested in ("flash", "fused"):
        yield f"{FLAG} {requested}: its kernels need CUDA; on the CPU attention runs as with auto"
    if not on_cpu and requested == "local":
        yield f"{FLAG} local: it has no CUDA kernel; on CUDA attention runs as with unfused"
    if not on_cpu and requested in ("unfused", "local"):
        yield (
            f"{FLAG} {requested}: the estimate of memory leaves out the scores of a layer, s x s "
            "for each head; --rehearse counts them"
        )


def check_float8(config: Config) -> None:
    """Raise UsageError for a float8 recipe that is not available, or does not fit the run."""
    f, m = config.float8, config.model
    if f.fp8_format is None:
        return
    recipe = f.fp8_recipe
    assert recipe is not None, "parse fills it in"
    if recipe not in RECIPES:
        why = f"; {ELSEWHERE[recipe]}" if recipe in ELSEWHERE else ""
        raise UsageError(f"--fp8-recipe {recipe}: must be one of {', '.join(RECIPES)}{why}")
    if config.run.dtype != torch.bfloat16 and not parallel_rules.on_cpu(config):
        raise UsageError(f"--fp8-format {f.fp8_format} needs --bf16, or --device cpu")
    at_start, at_end = f.num_layers_at_start_in_bf16, f.num_layers_at_end_in_bf16
    if f.first_last_layers_bf16 and at_start + at_end >= m.num_layers:
        raise UsageError(
            f"--num-layers-at-start-in-bf16 {at_start} and --num-layers-at-end-in-bf16 {at_end} "
            f"leave none of --num-layers {m.num_layers} in float8: omit --fp8-format"
        )
    unit = BLOCKS[RECIPES[recipe]] or ALIGN
    for what, size in _sizes(config):
        if size % unit:
            raise UsageError(
                f"--fp8-recipe {recipe}: {what} is {size}, which is not a multiple of {unit}"
            )


def _sizes(config: Config) -> Iterator[tuple[str, int]]:
    """Yield (flags, size) of the inner dimension k of each matrix product on a rank."""
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
        parts = 2 * cp if BLOCKS[RECIPES[config.float8.fp8_recipe or ""]] else cp
        times = "2 x " if parts > cp else ""
        what = f"--micro-batch-size {b} x --seq-length {s} / ({times}--context-parallel-size {cp})"
        yield what, b * s // parts


def check_recompute(config: Config) -> None:
    """Raise UsageError if --recompute-num-layers does not fit the model's layers."""
    p = config.parallel
    if p.recompute_granularity != "full":
        return
    if p.recompute_num_layers == 0:
        raise UsageError("--recompute-num-layers 0 needs --recompute-method block")
    if (p.recompute_num_layers or 1) > config.model.num_layers:
        raise UsageError(
            f"--recompute-num-layers {p.recompute_num_layers} is more than --num-layers "
            f"{config.model.num_layers}"
        )


def check_offload(config: Config) -> None:
    """Raise UsageError if --cpu-offload-activations would offload no layer of any stage."""
    g, p, layers = config.gpu, config.parallel, config.model.num_layers
    if not g.cpu_offload_activations:
        return
    stages = p.pipeline_model_parallel_size * p.virtual_stages
    layout = p.pipeline_model_parallel_layout
    own = [each.count("t") for each in read_layout(layout)] if layout else [ceil(layers / stages)]
    if max(own) < 2:
        raise UsageError(
            f"{OFFLOAD} has nothing to offload: the last layer of a stage stays on the device, and "
            f"--num-layers {layers} in {stages} pipeline stages gives no stage a second layer"
        )
    group = p.recompute_num_layers or 1 if p.recompute_method == "uniform" else 1
    if group >= max(own):
        raise UsageError(
            f"{OFFLOAD} has nothing to offload: the last group of recomputed layers of a stage "
            f"stays on the device, and --recompute-num-layers {group} gives no stage a second group"
        )
