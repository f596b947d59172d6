# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5, dense: a Llama with biases of queries, keys and values.

(Qwen2 technical report, 2024)
"""

from typing import Any

from model import llama
from model.huggingface import BIASES, filled, no_windows, unread, without
from model.llama import LlamaConfig, hf_names, parameter_group, read_hf_config, with_mup

# defaults of fields that are missing in a config.json
DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
UNREAD = BIASES  # fields of a Llama that transformers' Qwen2 does not have
__all__ = [
    "Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group",
    "with_mup",
]  # fmt: skip


class Attention(llama.Attention):
    """Grouped-query attention with biases of queries, keys and values."""

    qkv_bias = True


class Block(llama.Block):
    """One transformer layer, pre-norm."""

    attention_type = Attention


class Qwen2(llama.Llama):
    """The model, or this pipeline rank's stages of it; see model/llama.py."""

    block = Block


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return Hugging Face's config.json of the same model."""
    names = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return without(UNREAD, {**llama.hf_config(config, dtype), **names})


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    """Read a Hugging Face config.json of a dense Qwen2; reject what this file does not compute.

    Raises ValueError naming the field, its value and what is supported.
    """
    hf = filled(hf, DEFAULTS)
    rules = unread(UNREAD) | {"use_sliding_window": lambda v: not v or no_windows(hf)}
    config: LlamaConfig = read_hf_config(hf, "qwen2", rules=rules)
    return config


Model, ModelConfig = Qwen2, LlamaConfig
