# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face config.json: the sizes of a Llama, and the meaning of its fields.

A fork imports these functions from model/llama.py, by the names that they have there.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from mpu.layers.rope import LINEAR, Yarn

Rules = dict[str, Callable[[Any], bool]]
ORIGINAL = "original_max_position_embeddings"
BIASES = ("attention_bias", "mlp_bias")
LONGEST = 200  # characters of a value in a message; a quantization_config may list every layer
OFF = ("attention_bias", "attention_dropout", "mlp_bias", "per_layer_config",
       "quantization_config")  # fmt: skip
RULES: Rules = dict.fromkeys(OFF, lambda v: not v) | {
    "hidden_act": lambda v: v in ("silu", "swish"),
    "is_causal": bool,
    "layer_types": lambda v: set(v or ()) <= {"full_attention"},
    "partial_rotary_factor": lambda v: v in (None, 1),
}


def read_config(
    hf: dict[str, Any],
    model_type: str,
    make: Callable[..., Any],
    rules: Mapping[str, Callable[[Any], bool]],
    **own: Any,
) -> Any:
    """Return make(sizes of a Llama, and the model's own fields `own`) for a config.json.

    rules: the allowed values of fields, which extend or override RULES. Raises ValueError, naming
    the field, its value and what is supported.
    """
    rules = {"model_type": lambda v: v == model_type, **RULES, **rules}
    rope = read_rope(hf)
    there = filled(rope, hf)
    for field, allowed in rules.items():
        if field in there and not allowed(there[field]):
            value = repr(there[field])
            if len(value) > LONGEST:
                value = f"{value[:LONGEST]} ..."
            raise ValueError(
                f"config.json: {field} is {value}, which the model file of {model_type!r} does not "
                "support: give a --model-file that does"
            )
    if not own.keys() & MULTIPLIERS:  # a fork may read them into fields of its own
        own |= _multipliers(hf)
    return make(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        kv_channels=hf.get("head_dim") or 0,
        max_position_embeddings=hf.get("max_position_embeddings", 2048),
        norm_epsilon=hf.get("rms_norm_eps", 1e-6),
        tied=bool(hf.get("tie_word_embeddings", False)),
        init_method_std=hf.get("initializer_range", 0.02),
        **_rotary(rope, hf.get("max_position_embeddings", 2048)),
        **own,
    )


def filled(hf: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with defaults for missing fields, in a dictionary of the same type: that
    of a file raises an error when an unreadable value is accessed.
    """
    return type(hf)({**defaults, **hf})


def unread(fields: Iterable[str]) -> Rules:
    """Return rules that allow any value of fields that transformers' model does not read."""
    return dict.fromkeys(fields, lambda v: True)


def without(fields: Container[str], hf: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without fields that transformers' model of this type does not read."""
    return {field: value for field, value in hf.items() if field not in fields}


def window_rule(hf: Mapping[str, Any]) -> Rules:
    """Return the rule for a window in every layer: null, or as long as the longest sequence."""
    return {"sliding_window": lambda v: v is None or v >= hf["max_position_embeddings"]}


def no_windows(hf: Mapping[str, Any], last: int = 28) -> bool:
    """Return whether no layer has a window. transformers sets one for the layers from
    max_window_layers on (`last` if missing in config.json). layer_types has its own rule.
    """
    far = hf.get("max_window_layers", last) >= hf["num_hidden_layers"]
    given = hf.get("layer_types") is not None
    none = window_rule(hf)["sliding_window"](hf.get("sliding_window", 4096))
    return bool(given or far or none)


def read_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json for rotary positions in one dictionary, as transformers 5
    reads them: rope_type, rope_theta, original_max_position_embeddings and any others.

    rope_scaling takes precedence over rope_parameters, and fields in either of them over top-level
    fields, where transformers 4 has rope_theta; for original_max_position_embeddings the top level
    takes precedence. (transformers 5.24, RotaryEmbeddingConfigMixin in modeling_rope_utils.py.)
    Raises ValueError.
    """
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    inside = hf.get(name) or {}
    if not isinstance(inside, Mapping):
        raise ValueError(f"config.json: {name} is {inside!r}: it must be an object")
    for key, value in inside.items():
        if isinstance(value, Mapping) or key.endswith("_attention"):
            raise ValueError(
                f"config.json: {name} has {key} {value!r}: RoPE with different settings for some "
                "layers is not supported"
            )
    top = {k: hf[k] for k in ("rope_theta", "partial_rotary_factor") if k in hf}
    places = (hf, inside, {ORIGINAL: hf.get("max_position_embeddings", 2048)})
    original = next(place[ORIGINAL] for place in places if ORIGINAL in place)
    kind = inside.get("rope_type", inside.get("type", "default"))
    found = {"rope_theta": 10000.0, **top, **inside, "rope_type": kind, ORIGINAL: original}
    return type(hf)(found)


def _rotary(rope: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """Return the fields of a LlamaConfig for a result of `read_rope`: default, linear, llama3, or
    yarn (transformers' _compute_yarn_parameters).
    """
    kind, length = rope["rope_type"], rope[ORIGINAL]

    def number(name: str) -> float:
        value: Any = rope.get(name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(
                f"config.json: {name} of rope_type {kind!r} is {value!r}: it must be a finite "
                "number above 0"
            )
        return float(value)

    found: dict[str, Any] = {"rotary_base": number("rope_theta")}
    if type(length) is float and length.is_integer():
        length = int(length)
    if kind == "default" or (kind == "linear" and number("factor") == 1.0):
        return found
    if kind == "linear":
        return found | {"rope_scaling_factor": number("factor"), "rope_original_length": LINEAR}
    if kind == "llama3" and (number("low_freq_factor"), number("high_freq_factor")) == (1.0, 4.0):
        return found | {"rope_scaling_factor": number("factor"), "rope_original_length": length}
    if kind != "yarn":
        names = ("rope_type", "factor", "low_freq_factor", "high_freq_factor")
        has = ", ".join(f"{name} {rope[name]!r}" for name in names if name in rope)
        raise ValueError(
            f"config.json: rope_scaling has {has}: must be Llama 3.1's rule, yarn or linear"
        )
    ratio = "factor" in rope and rope["factor"] is None
    factor = positions / length if ratio else number("factor")
    attention, truncate = 0.0, bool(rope.get("truncate", True))
    if rope.get("attention_factor") is not None:
        attention = number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = Yarn.suggested(factor, number("mscale"), number("mscale_all_dim"))
    fast = number("beta_fast") if rope.get("beta_fast") else 32.0
    slow = number("beta_slow") if rope.get("beta_slow") else 1.0
    return found | {"yarn": Yarn(factor, length, fast, slow, attention, truncate)}


MULTIPLIERS = {"embedding_multiplier", "attention_multiplier", "logits_scaling"}


def _multipliers(hf: dict[str, Any]) -> dict[str, float]:
    """Return the LlamaConfig fields for Granite's multipliers (see hf_config), if there are any."""
    if not hf.keys() & MULTIPLIERS or hf.get("model_type") in ("llama", "mistral"):
        return {}  # transformers' Llama has none
    d = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    return {
        "embedding_mult": float(hf.get("embedding_multiplier", 1.0)),
        "logits_divisor": float(hf.get("logits_scaling", 1.0)),
        "softmax_scale": unless_standard(float(hf.get("attention_multiplier", d**-0.5)), d),
    }


def unless_standard(scale: float, head_size: int) -> float:
    """Return a softmax_scale, or 0 if it is the standard one, perhaps rounded to fp32."""
    return 0.0 if math.isclose(scale, head_size**-0.5, rel_tol=1e-7) else scale


def rope_scaling(config: Any) -> dict[str, Any] | None:
    """Return the rope_scaling of config.json for a LlamaConfig; `read_rope` is the inverse."""
    if (y := config.yarn) is not None:
        scaling = {
            "rope_type": "yarn",
            "factor": y.factor,
            "original_max_position_embeddings": y.original_length,
            "beta_fast": y.beta_fast,
            "beta_slow": y.beta_slow,
            "truncate": y.truncate,
        }
        if y.attention_factor != Yarn.suggested(y.factor):  # some readers only support the paper's
            scaling["attention_factor"] = y.attention_factor
        return scaling
    if not config.rope_scaling_factor:
        return None
    if config.rope_original_length == LINEAR:
        return {"rope_type": "linear", "factor": config.rope_scaling_factor}
    return {
        "rope_type": "llama3",
        "factor": config.rope_scaling_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": config.rope_original_length,
    }


def multipliers(config: Any) -> dict[str, Any]:
    """Return the fields of config.json for a LlamaConfig with muP's multipliers, which is a Granite
    in transformers: a Llama with such multipliers.
    """
    if (config.embedding_mult, config.logits_divisor, config.softmax_scale) == (1.0, 1.0, 0.0):
        return {}
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": config.embedding_mult,
        "attention_multiplier": config.softmax_scale or config.head_size**-0.5,
        "residual_multiplier": 1.0,
        "logits_scaling": config.logits_divisor,
    }
