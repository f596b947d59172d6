# SPDX-License-Identifier: Apache-2.0
"""Configure the layers of a new model from the flags, and choose which activations are kept,
recomputed or offloaded to host memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpu.activation_offload import HostCopies, Offload
from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.grid import Grid
from mpu.layers.linear_cross_entropy import linear_cross_entropy
from mpu.recompute import Recompute
from training.settings.config import Config, UsageError
from training.settings.expert_options import expert_options
from training.settings.float8_layers import in_float8
from training.settings.update_rules import qk_clip
from training.settings.zero_config import zero_config


def accumulate_dtype(config: Config) -> torch.dtype:
    """Return the dtype of gradients, masters and moments: fp32, or fp64 under --fp64."""
    return torch.float64 if config.run.dtype == torch.float64 else torch.float32


def main_grads_dtype(config: Config) -> torch.dtype:
    """Return the dtype in which a rank accumulates its own gradients."""
    return zero_config(config).main_grads_dtype or accumulate_dtype(config)


def context_of(
    config: Config,
    grid: Grid,
    device: torch.device,
    sink: GradientSink,
    *,
    even_experts: bool = False,
    **other: Any,
) -> LayerContext:
    """Return the LayerContext of a rank's model, from the flags.

    Every context of a run is made here, so code that measures, warms up or plans a step builds its
    model with the same options as the step. even_experts: spread tokens evenly over the experts,
    for a model whose weights have no values, where all experts would score alike. other: fields of
    LayerContext that override the flags.
    """
    p, experts = config.parallel, expert_options(config)
    given: dict[str, Any] = {
        "loss_in_chunks": linear_cross_entropy if p.fused_linear_cross_entropy else None,
        "cp_comm_type": p.cp_comm_type,
        "norm_backend": p.norm_backend,
        "attention_backend": p.attention_backend,
        "experts": experts._replace(force_balance=True) if even_experts else experts,
        "log_max_attention_logit": config.log.log_max_attention_logit,
        "qk_clip": qk_clip(config),
        "output_z_loss": config.optimizer.output_z_loss_coeff,
        "on_gpu": (config.parallel.device if device.type == "meta" else device.type) != "cpu",
    }
    return LayerContext(
        grid, p.sequence_parallel, config.run.dtype, accumulate_dtype(config), device, sink,
        **given | other,
    )  # fmt: skip


def recompute_of(
    config: Config, device: torch.device, recompute: Callable[..., Recompute] = Recompute
) -> Recompute:
    """Return the run's Recompute, with its Offload. recompute: a class of the same arguments."""
    p, g = config.parallel, config.gpu
    carried = None
    if g.cpu_offload_activations:
        carried = Offload(
            HostCopies(device),
            g.offload_modules,
            g.min_offloaded_tensor_size,
        )
    return recompute(
        p.recompute_granularity, p.recompute_method, p.recompute_num_layers or 1, carried
    )


def as_configured(config: Config, model: nn.Module, ctx: LayerContext) -> None:
    """Configure the layers of a new model from the flags. Raises ValueError if they do not fit."""
    check_modules(config, model)
    in_float8(config, model, ctx)
    if config.parallel.defers_output_layer:
        for layer in model.modules():
            if getattr(layer, "output_layer", False):
                layer.weight.late = True  # type: ignore[union-attr]


def check_modules(config: Config, model: nn.Module) -> None:
    """Raise UsageError if --offload-modules names a module that no numbered layer of it has."""
    names: set[str] = set()
    for name, _ in model.named_modules():
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is not None and parts[at + 1 :]:
            names.add(".".join(parts[at + 1 :]))
    for name in config.gpu.offload_modules:
        if name not in names:
            raise UsageError(
                f"--offload-modules {name}: must be among {', '.join(sorted(names))}, the modules "
                f"of a layer in {config.model.model_file}"
            )
