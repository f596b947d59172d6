# SPDX-License-Identifier: Apache-2.0
"""What the flags of a mixture of experts mean for a model and its layers."""

from typing import Any

from mpu.context import ExpertOptions
from training.arguments import EXPERT_SIZES
from training.config import Config


def own_sizes(config: Config) -> dict[str, Any]:
    """Return the sizes that only some models have, by name: of experts, and a fork's own."""
    names = EXPERT_SIZES if config.moe.experts else ()
    return {name: getattr(config.moe, name) for name in names} | dict(config.extra)


def expert_options(config: Config) -> ExpertOptions:
    """Return what the flags ask of a mixture of experts beside its sizes."""
    m, kinds = config.moe, config.moe.moe_router_load_balancing_type
    coefficients = m.moe_aux_loss_coeff * (len(kinds) // len(m.moe_aux_loss_coeff))
    return ExpertOptions(
        config.parallel.moe_token_dispatcher_type,
        tuple((k, c) for k, c in zip(kinds, coefficients, strict=True) if k != "none" and c),
        m.moe_z_loss_coeff,
        m.moe_router_force_load_balancing,
        config.rehearse.rehearse_expert_skew,
    )
