# SPDX-License-Identifier: Apache-2.0
"""Granite 3: a Llama with four multipliers. (IBM Granite 3.0 language models, 2024)

    h = embedding(tokens) * embedding_multiplier
    h = h + residual_multiplier * attention(norm(h)), and the same for the MLP
    scores = attention_multiplier * q k^T, instead of q k^T / sqrt(d)
    logits = head(norm(h)) / logits_scaling
"""

import argparse
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from model import llama
from model.huggingface import filled
from model.llama import Cache, LlamaConfig, Packed, hf_names, parameter_group, read_hf_config
from mpu.context import LayerContext
from mpu.recompute import Recompute

FLAGS = {  # field of the config: Hugging Face's name of it, also used for the flag
    "embedding_mult": "embedding_multiplier",
    "softmax_scale": "attention_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}
__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    embedding_mult: float = 12.0
    softmax_scale: float = 0.0078125
    residual_multiplier: float = 0.22
    logits_divisor: float = 8.0


class Block(llama.Block):
    def __init__(self, config: GraniteConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        self.multiplier = config.residual_multiplier

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        x, h = self.attention_norm(h)
        branch = self.attention(x, cos, sin, packed, cache) * self.multiplier
        x, h = self.mlp_norm(h, branch)
        return h + self.mlp(x) * self.multiplier


class Granite(llama.Llama):
    config: GraniteConfig
    block = Block


def hf_config(config: GraniteConfig, dtype: str = "float32") -> dict[str, Any]:
    own = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    scale = config.softmax_scale or config.head_size**-0.5
    own |= {theirs: getattr(config, ours) for ours, theirs in FLAGS.items()}
    return {**llama.hf_config(config, dtype), **own, "attention_multiplier": scale}


def from_hf_config(hf: dict[str, Any]) -> GraniteConfig:
    hf = filled(hf, dict.fromkeys(FLAGS.values(), 1.0))
    residual = hf["residual_multiplier"]
    return read_hf_config(hf, "granite", GraniteConfig, residual_multiplier=residual)


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    for field, name in FLAGS.items():
        default = getattr(GraniteConfig, field)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=default, dest=field)


Model, ModelConfig = Granite, GraniteConfig
