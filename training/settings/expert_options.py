# SPDX-License-Identifier: Apache-2.0
"""Convert the flags of a mixture of experts into sizes of the model and options of its layers."""

from typing import Any

from mpu.context import ExpertOptions
from training.settings.arguments import EXPERT_SIZES
from training.settings.config import Config


def own_sizes(config: Config) -> dict[str, Any]:
    """Return {name: size} of the sizes that a dense Llama lacks: of experts, and a fork's own."""
    names = EXPERT_SIZES if config.moe.experts else ()
    return {name: getattr(config.moe, name) for name in names} | dict(config.extra)


def expert_options(config: Config) -> ExpertOptions:
    """Return the options of a mixture of experts other than its sizes."""
    m, kinds = config.moe, config.moe.moe_router_load_balancing_type
    coefficients = m.moe_aux_loss_coeff * (len(kinds) // len(m.moe_aux_loss_coeff))
    losses = zip(kinds, coefficients, strict=True)
    return ExpertOptions(
        dispatcher=config.parallel.moe_token_dispatcher_type,
        balance=tuple((kind, c) for kind, c in losses if kind != "none" and c),
        z_coefficient=m.moe_z_loss_coeff,
        force_balance=m.moe_router_force_load_balancing,
        skew=config.rehearse.rehearse_expert_skew,
        bias_update_rate=m.moe_router_bias_update_rate,
        capacity_factor=m.moe_expert_capacity_factor or None,
        pad_to_capacity=m.moe_pad_expert_input_to_capacity,
    )
