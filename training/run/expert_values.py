# SPDX-License-Identifier: Apache-2.0
"""What a line of the log says of a mixture of experts: how even its load is, what was dropped.

expert_load              tokens of the fullest expert over the mean of its layer, in the layer
                         where this is largest: 1 is even
dropped_share            of the pairs (token, expert), those that found their expert full
layer_I/...              with --moe-per-layer-logging: the same of layer I, and its router's
                         losses a token
expert_tokens            with it: [layer, [tokens of each expert]]
"""

from typing import Any

import torch

from mpu.comm.collectives import sum_in_order
from mpu.comm.transport import Label
from mpu.host_memory import read_values
from mpu.layers.expert_load import ExpertLoad, ExpertLoads
from training.run.state import Run
from training.settings.config import Config

LABEL = Label("experts", "log")


def expert_values(run: Run, tokens: int) -> dict[str, Any]:
    """Return the numbers of the last step, {} for a dense model. Waits for the device.

    tokens: of its global batch. All ranks call it: the stages of a pipeline tell one another.
    """
    config = run.config
    if not config.moe.experts:
        return {}
    dense = torch.zeros(config.moe.experts + 3, dtype=torch.float64, device=run.device)
    rows = [dense] * config.model.num_layers
    loads = run.sink.state_of(ExpertLoads)
    if loads is not None and loads.counts is not None:
        layer_of = {
            module: int(name.split(".")[1])
            for name, module in run.module.named_modules()
            if isinstance(module, ExpertLoad)
        }
        assert loads.dropped is not None and loads.losses is not None
        more = (loads.dropped, loads.losses, torch.ones_like(loads.losses))
        found = torch.cat([loads.counts, torch.stack(more, 1)], 1)
        for load, row in zip(loads.loads, found, strict=True):
            rows[layer_of[load]] = row
    every = sum_in_order(torch.stack(rows), run.grid.pp, LABEL)  # of this stage's layers, else 0
    return of_step(read_values(every), tokens, config)


def of_step(rows: list[list[float]], tokens: int, config: Config) -> dict[str, Any]:
    """Return what `rows` say: of each layer the counts, drops, losses, and whether it is sparse."""
    values: dict[str, Any] = {}
    each, loads, dropped, pairs = dict[str, Any](), list[float](), 0.0, 0.0
    counted = list[list[Any]]()
    for i, (*counts, lost, losses, sparse) in enumerate(rows):
        if not sparse or not sum(counts):
            continue
        loads.append(max(counts) * len(counts) / sum(counts))
        dropped, pairs = dropped + lost, pairs + sum(counts)
        each |= {f"layer_{i}/expert_load": loads[-1], f"layer_{i}/router_loss": losses / tokens}
        if config.moe.moe_expert_capacity_factor:
            each[f"layer_{i}/dropped_share"] = lost / sum(counts)
        counted.append([i, [round(count) for count in counts]])
    if loads:
        values["expert_load"] = max(loads)
    if pairs and config.moe.moe_expert_capacity_factor:
        values["dropped_share"] = dropped / pairs
    if config.moe.moe_per_layer_logging:
        values |= each | {"expert_tokens": counted}
    return values
