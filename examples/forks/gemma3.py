# SPDX-License-Identifier: Apache-2.0
"""Gemma 3's text models: five layers with a sliding window, then one without. (Gemma Team 2025)

    h = embedding(tokens) * sqrt(hidden size)
    h = h + norm(attention(norm(h)));  h = h + norm(mlp(norm(h)))
    scores = norm(q) norm(k)^T / sqrt(query_pre_attn_scalar), norms of each head

Norms multiply by 1 + w. Layers with a window use another RoPE base than the others: the model's
RoPE table has both, and each layer takes its half.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mpu.layers.fused as fused
from model import llama, qwen3
from model.huggingface import filled
from model.llama import Cache, LlamaConfig, Packed, hf_names, parameter_group, read_hf_config
from mpu.context import LayerContext
from mpu.layers.rope import rope_frequencies
from mpu.param import Region
from mpu.recompute import Recompute

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]
DEFAULTS = {
    "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4,
    "max_position_embeddings": 131072, "rope_theta": 1e6,
}  # fmt: skip
OWN = {  # fields of the config with the names of config.json, and their defaults there
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000.0,
}


@dataclass(frozen=True)
class Gemma3Config(LlamaConfig):
    query_pre_attn_scalar: int = 256
    sliding_window: int = 512  # tokens; 0 in the config of a layer without a window
    sliding_window_pattern: int = 6  # the last of each group of this many layers has no window
    rope_local_base_freq: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window_pattern < 1:
            raise ValueError(
                f"sliding_window_pattern is {self.sliding_window_pattern}: it must be 1 or more"
            )


class RMSNorm(fused.RMSNorm):
    zero_centered = True


class ResidualRMSNorm(fused.ResidualRMSNorm):
    zero_centered = True


class Attention(qwen3.Attention):
    def __init__(self, config: Gemma3Config, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        d, eps, region = config.head_size, config.norm_epsilon, Region.TENSOR_PARALLEL
        self.q_norm = RMSNorm(d, ctx=ctx, eps=eps, region=region)
        self.k_norm = RMSNorm(d, ctx=ctx, eps=eps, region=region)
        self.window = config.sliding_window

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        cos, sin = (table.chunk(2, -1)[self.window > 0].contiguous() for table in (cos, sin))
        return super().forward(x, cos, sin, packed, cache)


class MLP(llama.MLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class Block(llama.Block):
    attention_type, mlp_type, norm_type = Attention, MLP, ResidualRMSNorm

    def __init__(self, config: Gemma3Config, ctx: LayerContext, recompute: Recompute) -> None:
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


class Gemma3(llama.Llama):
    config: Gemma3Config
    block, norm_type = Block, RMSNorm
    hf_modules = {
        **qwen3.Qwen3.hf_modules,
        "attention_out_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_out_norm": ("post_feedforward_layernorm",),
    }

    def layer_config(self, i: int) -> LlamaConfig:
        whole = kinds(self.config.num_layers, self.config.sliding_window_pattern)[i] == FULL
        return replace(self.config, sliding_window=0) if whole else self.config

    def initial_vector(self, name: str) -> float:
        return 0.0

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) * self.config.hidden_size**0.5

    def frequencies(self) -> Tensor:
        local = rope_frequencies(self.config.head_size, self.config.rope_local_base_freq)
        return torch.cat([super().frequencies(), local])

    def rope(self, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        cos, sin = super().rope(positions, length)
        c = self.config
        scale = (c.head_size / c.query_pre_attn_scalar) ** 0.25  # of q and k: its square is due
        local = scale / (1.0 if c.yarn is None else c.yarn.attention_factor)  # is of the others
        halves = (table.chunk(2, -1) for table in (cos, sin))
        cos, sin = (torch.cat([whole * scale, near * local], -1) for whole, near in halves)
        return cos, sin


FULL = "full_attention"


def kinds(layers: int, pattern: int) -> list[str]:
    """Return the kind of each layer, as in layer_types of a config.json."""
    return [("sliding_attention", FULL)[(i + 1) % pattern == 0] for i in range(layers)]


def hf_config(config: Gemma3Config, dtype: str = "float32") -> dict[str, Any]:
    own = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    own |= {name: getattr(config, name) for name in OWN}
    hf = llama.hf_config(config, dtype)
    del hf["hidden_act"]
    return {**hf, **own, "hidden_activation": "gelu_pytorch_tanh"}


def from_hf_config(hf: dict[str, Any]) -> Gemma3Config:
    rope = hf.get("rope_parameters") or {}
    if FULL in rope:  # as transformers 5 writes it
        local, rope = rope["sliding_attention"], rope[FULL]
        if local.get("rope_type", "default") != "default":
            raise ValueError(
                f"config.json: sliding_attention of rope_parameters is {local}: the positions of "
                "layers with a window cannot be scaled"
            )
        hf = {**hf, "rope_parameters": rope, "rope_local_base_freq": local["rope_theta"]}
    hf = filled(hf, DEFAULTS | OWN)
    layers = hf["num_hidden_layers"]
    if listed := hf.get("layer_types"):
        fits = [n for n in range(1, layers + 2) if kinds(layers, n) == listed]
        hf = {**hf, "sliding_window_pattern": fits[0] if fits else 0}
    rules = {
        "hidden_act": lambda v: True,  # transformers reads hidden_activation
        "hidden_activation": lambda v: v in ("gelu_pytorch_tanh", None),
        "layer_types": lambda v: v is None or hf["sliding_window_pattern"],
        "use_bidirectional_attention": lambda v: not v,
        "attn_logit_softcapping": lambda v: v is None,
        "final_logit_softcapping": lambda v: v is None,
    }
    own = {name: hf[name] for name in OWN}
    return read_hf_config(hf, "gemma3_text", Gemma3Config, rules, **own)


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    for name in OWN:
        default = getattr(Gemma3Config, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)


Model, ModelConfig = Gemma3, Gemma3Config
