# SPDX-License-Identifier: Apache-2.0
"""GLM-4 (0414): norms before and after each branch, and RoPE of neighbours. (Team GLM 2024)

    h = h + norm(attention(norm(h)));  h = h + norm(mlp(norm(h)))

RoPE rotates the first `rotary_factor` of each head, elements 2i and 2i + 1 together. Weft's RoPE
rotates i and i + r/2 of r elements, so q and k are reordered before it, which leaves their product
unchanged. Checkpoints have gate and up in one tensor.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model import llama
from model.huggingface import filled, read_rope
from model.llama import Cache, LlamaConfig, Packed, hf_names, parameter_group, read_hf_config
from mpu.context import LayerContext
from mpu.layers.fused import RMSNorm
from mpu.recompute import Recompute

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]
DEFAULTS = {
    "attention_bias": True, "rms_norm_eps": 1.5625e-7, "head_dim": 128, "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
}  # fmt: skip


@dataclass(frozen=True)
class Glm4Config(LlamaConfig):
    rotary_factor: float = 0.5  # share of a head that RoPE rotates
    attention_bias: bool = True  # of q, k and v

    @property
    def rotary_size(self) -> int:
        return int(self.head_size * self.rotary_factor)


class Attention(llama.Attention):
    def __init__(self, config: Glm4Config, ctx: LayerContext, recompute: Recompute) -> None:
        self.qkv_bias = config.attention_bias
        super().__init__(config, ctx, recompute)

    def project(self, x: Tensor) -> Tensor:
        a, g, r = self.heads, self.groups, self.rotary or self.head_size
        qk, v = super().project(x).unflatten(-1, (a + 2 * g, -1)).split([a + g, g], 2)
        qk = torch.cat([qk[..., 0:r:2], qk[..., 1:r:2], qk[..., r:]], -1)
        return torch.cat([qk, v], 2).flatten(2)


class Block(llama.Block):
    attention_type = Attention

    def __init__(self, config: Glm4Config, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        h, eps = config.hidden_size, config.norm_epsilon
        self.attention_out_norm = RMSNorm(h, ctx=ctx, eps=eps)
        self.mlp_out_norm = RMSNorm(h, ctx=ctx, eps=eps)

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        x, h = self.attention_norm(h)
        branch = self.attention_out_norm(self.attention(x, cos, sin, packed, cache))
        x, h = self.mlp_norm(h, branch)
        return h + self.mlp_out_norm(self.mlp(x))


class Glm4(llama.Llama):
    block = Block
    hf_modules = {
        **llama.Llama.hf_modules,
        "attention_out_norm": ("post_self_attn_layernorm",),
        "mlp_out_norm": ("post_mlp_layernorm",),
        "mlp.gate_up": ("mlp.gate_up_proj",) * 2,
    }


def hf_config(config: Glm4Config, dtype: str = "float32") -> dict[str, Any]:
    own = {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "partial_rotary_factor": config.rotary_factor,
        "attention_bias": config.attention_bias,
    }
    return {**llama.hf_config(config, dtype), **own}


def from_hf_config(hf: dict[str, Any]) -> Glm4Config:
    hf = filled(hf, DEFAULTS)
    rules = {"attention_bias": lambda v: True, "partial_rotary_factor": lambda v: True}
    own = {
        "rotary_factor": read_rope(hf).get("partial_rotary_factor", 0.5),
        "attention_bias": hf["attention_bias"],
    }
    return read_hf_config(hf, "glm4", Glm4Config, rules, **own)


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rotary-factor", type=float, default=0.5, help="share that RoPE rotates")
    bias = argparse.BooleanOptionalAction
    parser.add_argument("--attention-bias", action=bias, default=True, help="of q, k and v")


Model, ModelConfig = Glm4, Glm4Config
