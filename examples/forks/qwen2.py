# SPDX-License-Identifier: Apache-2.0
"""Qwen2: a Llama with biases of queries, keys and values. (Qwen2 technical report, 2024)"""

from typing import Any

from model import llama
from model.llama import LlamaConfig, hf_names, parameter_group, read_hf_config

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


class Attention(llama.Attention):
    qkv_bias = True


class Block(llama.Block):
    attention_type = Attention


class Qwen2(llama.Llama):
    block = Block


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    names = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {**llama.hf_config(config, dtype), **names}


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    return read_hf_config(hf, "qwen2")


Model, ModelConfig = Qwen2, LlamaConfig
