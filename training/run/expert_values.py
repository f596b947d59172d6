# SPDX-License-Identifier: Apache-2.0
"""The log's values of a mixture of experts: load balance and dropped tokens.

expert_load              tokens of the fullest expert over the mean of its layer, in the layer
                         where this is largest: 1 is even
dropped_share            the share of (token, expert) pairs that were dropped, as the expert was
                         full
layer_I/...              with --moe-per-layer-logging: the same values of layer I, and the losses
                         of its router per token
expert_tokens            with that flag: [layer, [tokens of each expert]]
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
    """Return the values of the last step, {} for a dense model. Waits for the device.

    tokens: of its global batch. All ranks call it: it sums over the stages of a pipeline.
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
    every = sum_in_order(torch.stack(rows), run.grid.pp, LABEL)  # other stages' rows are 0
    return of_step(read_values(every), tokens, config)


def of_step(rows: list[list[float]], tokens: int, config: Config) -> dict[str, Any]:
    """Return the values of one step.

    rows: for each layer, the tokens of each expert, the dropped pairs, the router's losses, and
    whether the layer is sparse.
    """
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
