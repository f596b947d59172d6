# SPDX-License-Identifier: Apache-2.0
"""A Llama with attention sinks, a learned logit of each head, as gpt-oss has them."""

from typing import Any

from torch import Tensor

from model import llama
from model.llama import Cache, LlamaConfig, Packed, hf_names, parameter_group, read_hf_config
from mpu.context import LayerContext
from mpu.gradients import use
from mpu.layers.context_attention import core_attention_of
from mpu.layers.fused import apply_rope
from mpu.layers.linear import column_vector
from mpu.recompute import Recompute

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


class Attention(llama.Attention):
    def __init__(self, config: LlamaConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        self.sinks = column_vector(config.num_attention_heads, ctx=ctx)
        self.core = recompute.selective(core_attention_of(ctx).attend)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        q, k, v = apply_rope(self.qkv(x), cos, sin, self.heads, self.groups)
        sinks = use(self.sinks, self.ctx.sink)
        return self.proj(self.core(q, k, v, packed, cache, 5, sink=sinks))


class Block(llama.Block):
    attention_type = Attention


class Model(llama.Llama):
    block = Block


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    return {**llama.hf_config(config, dtype), "model_type": "sinks"}


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    config: LlamaConfig = read_hf_config(hf, "sinks")
    return config


ModelConfig = LlamaConfig
