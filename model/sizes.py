# SPDX-License-Identifier: Apache-2.0
"""Check the sizes of a model from any source: flags, a config.json, a checkpoint."""

import math
from typing import Any

# upper bounds, far beyond any model; the flags (settings/arguments.py) have the same bounds
MOST = {
    "vocab_size": (1 << 31) - 1,
    "hidden_size": 1 << 20,
    "ffn_hidden_size": 1 << 23,
    "num_layers": 1 << 10,
    "num_attention_heads": 1 << 16,
    "num_query_groups": 1 << 16,
    "kv_channels": 1 << 16,
    "max_position_embeddings": 1 << 40,
    "rope_original_length": 1 << 40,
    "make_vocab_size_divisible_by": (1 << 31) - 1,
}
POSITIVE = ("rotary_base", "norm_epsilon", "init_method_std")
IN_JSON = {  # their names in a config.json
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "rotary_base": "rope_theta",
    "norm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}


def check_sizes(config: Any) -> None:
    """Raise ValueError, naming the field, for invalid sizes. config: a LlamaConfig."""

    def refuse(name: str, rule: str) -> ValueError:
        also = f" ({IN_JSON[name]})" if name in IN_JSON else ""
        return ValueError(f"{name}{also} is {getattr(config, name)!r}: it must be {rule}")

    for name, most in MOST.items():
        value, least = getattr(config, name), int(name != "kv_channels")
        if type(value) is not int or not least <= value <= most:
            raise refuse(name, f"a whole number from {least} to {most}")
    for name in (*POSITIVE, "rope_scaling_factor"):
        value, off = getattr(config, name), name == "rope_scaling_factor"
        if type(value) not in (int, float) or not (0 < value < math.inf or off and value == 0):
            raise refuse(name, "a finite number above 0")
    if (yarn := getattr(config, "yarn", None)) is not None:
        _check_yarn(yarn, config.rotary_base)
    heads = config.num_attention_heads
    if config.kv_channels == 0 and config.hidden_size % heads:
        raise refuse("num_attention_heads", f"a divisor of hidden_size, {config.hidden_size}")
    if heads % config.num_query_groups:
        raise refuse("num_query_groups", f"a divisor of num_attention_heads, {heads}")


def _check_yarn(yarn: Any, base: float) -> None:
    """Raise ValueError, naming the field, for an invalid scaling (mpu.layers.rope.Yarn)."""
    least = {"factor": 1.0, "beta_fast": 0.0, "beta_slow": 0.0, "attention_factor": 0.0}
    for name, low in least.items():
        value = getattr(yarn, name)
        if type(value) not in (int, float) or not low <= value < math.inf or not value:
            rule = "from 1 on" if low else "above 0"
            raise ValueError(f"yarn's {name} is {value!r}: it must be a finite number {rule}")
    length, most = yarn.original_length, MOST["max_position_embeddings"]
    if type(length) is not int or not 1 <= length <= most:
        raise ValueError(
            f"yarn's original_max_position_embeddings is {length!r}: it must be a whole number "
            f"from 1 to {most}"
        )
    if yarn.beta_fast < yarn.beta_slow:
        raise ValueError(
            f"yarn's beta_fast is {yarn.beta_fast:g}: it must be at least beta_slow, "
            f"{yarn.beta_slow:g}"
        )
    if base <= 1:
        raise ValueError(f"rotary_base (rope_theta) is {base!r}: with yarn it must be above 1")
