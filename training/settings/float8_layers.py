# SPDX-License-Identifier: Apache-2.0
"""Switch a model's layers to the float8 recipe of the flags."""

import torch
from torch import nn

from mpu.context import LayerContext
from mpu.layers.float8 import cuda as float8_cuda
from mpu.layers.float8.delayed import Delayed
from mpu.layers.float8.recipe import Float8, use_float8
from mpu.layers.float8.rows import RECIPES
from training.settings.config import Config, UsageError


def layers_in_bf16(config: Config) -> set[int]:
    """Return the indices of the layers that stay in bf16."""
    f, count = config.float8, config.model.num_layers
    if not f.first_last_layers_bf16:
        return set()
    first, last = f.num_layers_at_start_in_bf16, f.num_layers_at_end_in_bf16
    return {*range(first), *range(count - last, count)}


def check_device(config: Config, device: torch.device) -> None:
    """Raise UsageError if a GPU does not support the run's float8 recipe."""
    f = config.float8
    if f.fp8_format is not None and device.type == "cuda":
        assert f.fp8_recipe is not None, "compute_rules.check_float8"
        if why := float8_cuda.unsupported(RECIPES[f.fp8_recipe], device):
            raise UsageError(why)


def recipe_of(config: Config, ctx: LayerContext) -> Float8:
    """Return the run's float8 recipe, without the amax histories of delayed scaling."""
    f = config.float8
    assert f.fp8_recipe is not None and f.fp8_format is not None, "compute_rules.check_float8"
    batch, dp = config.batch, config.parallel.data_parallel_size
    several = batch.global_batch_size > batch.micro_batch_size * dp
    return Float8(
        RECIPES[f.fp8_recipe], f.fp8_format, ctx, wgrad=not f.fp8_wgrad_bf16,
        keeps=several and not f.no_fp8_weight_cache,
    )  # fmt: skip


def in_float8(config: Config, model: nn.Module, ctx: LayerContext) -> None:
    """Switch a model's layers to float8 if the run uses it. Raises ValueError (use_float8)."""
    f = config.float8
    if f.fp8_format is not None:
        check_device(config, ctx.device)
        delayed = None
        if f.fp8_recipe == "delayed":
            newest = f.fp8_amax_compute_algo == "most_recent"
            delayed = Delayed(f.fp8_amax_history_len, newest)
        recipe = recipe_of(config, ctx)
        use_float8(model, recipe, layers_in_bf16(config), delayed)
