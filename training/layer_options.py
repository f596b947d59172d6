# SPDX-License-Identifier: Apache-2.0
"""Give a new model what the flags ask of its layers, and decide which activations are kept,
recomputed or put in host memory.
"""

import torch
from torch import nn

from mpu.activation_offload import HostCopies, Offload
from mpu.context import LayerContext
from mpu.recompute import Recompute
from training.config import Config, UsageError
from training.float8_layers import in_float8


def recompute_of(
    config: Config,
    device: torch.device,
    copies: type[HostCopies] = HostCopies,
    offload: type[Offload] = Offload,
    recompute: type[Recompute] = Recompute,
) -> Recompute:
    """Return the run's Recompute, with its Offload. The classes are the planner's, or the run's."""
    p, g = config.parallel, config.gpu
    carried = None
    if g.cpu_offload_activations:
        carried = offload(
            copies(device),
            g.cpu_offloading_num_layers,
            g.offload_modules,
            g.min_offloaded_tensor_size,
        )
    return recompute(
        p.recompute_granularity, p.recompute_method, p.recompute_num_layers or 1, carried
    )


def as_configured(config: Config, model: nn.Module, ctx: LayerContext) -> None:
    """Let a new model do what the flags ask of its layers. Raises ValueError where it cannot."""
    check_modules(config, model)
    in_float8(config, model, ctx)
    if config.parallel.defers_output_layer:
        for layer in model.modules():
            if getattr(layer, "output_layer", False):
                layer.weight.late = True  # type: ignore[union-attr]


def check_modules(config: Config, model: nn.Module) -> None:
    """Raise UsageError where --offload-modules names what no numbered layer of a model has."""
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
