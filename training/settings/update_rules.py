# SPDX-License-Identifier: Apache-2.0
"""Define the update rule, weight decay and learning rate of each group of parameters.

    group of model/llama.py    optimizer       weight decay      learning rate
    matrix                     --optimizer     --weight-decay    --lr
    vector                     --optimizer     0                 --lr
    embedding                  --optimizer     --weight-decay    --decoupled-lr, or --lr

With --use-mup the model's file gives the divisor of --lr and --adam-eps for each group.

A fork marks exceptions by the ending of a name: matrix_no_decay, vector_decay, embedding_no_decay.
An optimizer of whole matrices (Muon) updates the groups of matrices, and AdamW the others.
--param-group multiplies the learning rate and the weight decay of parameters by name, and each pair
of factors has groups of its own (training/settings/param_groups.py).
"""

from collections.abc import Callable, Mapping

from mpu.context import QKClip
from mpu.mup import MuP
from mpu.optim.adam import AdamW
from mpu.optim.interface import Group, UpdateRule
from mpu.optim.muon import Muon
from mpu.optim.newton_schulz import coefficients_of
from mpu.optim.owners import Split
from mpu.param import GROUPS, decays, times
from training.settings.config import Config
from training.settings.param_groups import factors


def _adamw(config: Config) -> UpdateRule:
    o = config.optimizer
    return AdamW((o.adam_beta1, o.adam_beta2), o.adam_eps, config.parallel.optimizer_backend)


def _muon(config: Config) -> UpdateRule:
    o = config.optimizer
    return Muon(
        o.muon_momentum,
        o.muon_use_nesterov,
        coefficients_of(o.muon_coefficient_type, o.muon_num_ns_steps),
        o.muon_scale_mode,
        o.muon_extra_scale_factor,
        Split(qkv=not o.muon_no_split_qkv, others=not o.muon_no_split_gate_up),
        bf16=o.muon_fp32_matmul_prec == "medium",
    )


# {value of --optimizer: function that makes its update rule from the flags}
RULES: dict[str, Callable[[Config], UpdateRule]] = {"adam": _adamw, "muon": _muon}


def mup_of(config: Config) -> MuP | None:
    """Return the settings of muP, None without --use-mup."""
    m = config.model
    if not m.use_mup:
        return None
    assert m.mup_base_hidden_size, "a rule of the flags"
    return MuP(
        m.mup_base_hidden_size,
        m.mup_embedding_mult,
        m.mup_output_mult,
        m.mup_base_head_dim,
    )


def qk_clip(config: Config) -> QKClip | None:
    """Return the settings of --qk-clip, None without it."""
    o = config.optimizer
    return QKClip(o.qk_clip_threshold, o.qk_clip_alpha) if o.qk_clip else None


def needs_full_matrices(config: Config) -> bool:
    """Return whether the optimizer takes whole matrices, which need an axis (Grid.instance)."""
    return RULES[config.optimizer.optimizer](config).needs_full_matrices


def optimizer_groups(
    config: Config, divisors: Mapping[str, float] | None = None
) -> dict[str, Group]:
    """Return {group name: its update rule and constants}.

    divisors: muP's (mpu/mup.py). A rule of whole matrices has a scale of its own, so they do not
    apply to it, as in Megatron-LM.
    """
    rule, decay = RULES[config.optimizer.optimizer](config), config.optimizer.weight_decay
    rest = _adamw(config) if rule.needs_full_matrices else rule
    own = [name for name in GROUPS if rule.needs_full_matrices and name.startswith("matrix")]
    return {
        times(name, lr_mult, wd_mult): Group(
            rule if name.startswith("matrix") else rest,
            weight_decay=decay * wd_mult if decays(name) else 0.0,
            decoupled=name.startswith("embedding"),
            divisor=1.0 if name in own else (divisors or {}).get(name, 1.0),
            lr_mult=lr_mult,
        )
        for lr_mult, wd_mult in factors(config.optimizer.param_group)
        for name in GROUPS
    }
