# SPDX-License-Identifier: Apache-2.0
"""Granite 3: a Llama with four multipliers. (IBM Granite 3.0 language models, 2024)

    h = embedding(tokens) * embedding_multiplier
    h = h + residual_multiplier * attention(norm(h)), and the MLP alike
    scores = attention_multiplier * q k^T, in place of q k^T / sqrt(d)
    logits = head(norm(h)) / logits_scaling
"""

import argparse
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from model import llama
from model.llama import Cache, LlamaConfig, Packed, hf_names, parameter_group, read_hf_config
from mpu.context import LayerContext
from mpu.recompute import Recompute

MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    embedding_multiplier: float = 12.0
    attention_multiplier: float = 0.0078125
    residual_multiplier: float = 0.22
    logits_scaling: float = 8.0


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

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) * self.config.embedding_multiplier

    def last_norm(self, h: Tensor) -> Tensor:
        return super().last_norm(h) / self.config.logits_scaling  # the head is linear

    def rope(self, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        cos, sin = super().rope(positions, length)
        scale = (self.config.attention_multiplier * self.config.head_size**0.5) ** 0.5
        return cos * scale, sin * scale  # of q and of k: their product has it twice


def hf_config(config: GraniteConfig, dtype: str = "float32") -> dict[str, Any]:
    own = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    own |= {name: getattr(config, name) for name in MULTIPLIERS}
    return {**llama.hf_config(config, dtype), **own}


def from_hf_config(hf: dict[str, Any]) -> GraniteConfig:
    own = {name: hf.get(name, 1.0) for name in MULTIPLIERS}
    return read_hf_config(hf, "granite", GraniteConfig, **own)


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    for name in MULTIPLIERS:
        default = getattr(GraniteConfig, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)


Model, ModelConfig = Granite, GraniteConfig
