# SPDX-License-Identifier: Apache-2.0
"""Gemma 2: norms of 1 + w around attention and MLP, GeGLU, soft-caps. (Gemma Team 2024)

    h = embedding(tokens) * sqrt(hidden size)
    h = h + norm(attention(norm(h)));  h = h + norm(mlp(norm(h)))
    scores = cap(q k^T / sqrt(query_pre_attn_scalar));  logits = cap(head(norm(h)))
    cap(x) = c tanh(x / c)

Layers 0, 2, 4, ... attend to the last `sliding_window` tokens. No fused kernel caps scores: unless
--attn-logit-softcapping is 0 they are s x s matrices, and context parallelism is not available.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mpu.layers.fused as fused
from model import llama
from model.huggingface import filled
from model.llama import Cache, LlamaConfig, Packed, hf_names, parameter_group, read_hf_config
from mpu.context import LayerContext
from mpu.layers.fused import apply_rope
from mpu.recompute import Recompute

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]
DEFAULTS = {
    "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}  # fmt: skip
OWN = {  # fields of the config, and their defaults in a config.json; 0: none
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}


@dataclass(frozen=True)
class Gemma2Config(LlamaConfig):
    query_pre_attn_scalar: int = 256
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 30.0
    sliding_window: int = 4096


class RMSNorm(fused.RMSNorm):
    zero_centered = True


class ResidualRMSNorm(fused.ResidualRMSNorm):
    zero_centered = True


class Attention(llama.Attention):
    def __init__(self, config: Gemma2Config, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        self.window, self.cap = config.sliding_window, config.attn_logit_softcapping
        if self.cap:
            if ctx.grid.cp.size > 1:
                raise ValueError(
                    f"--attn-logit-softcapping {self.cap} needs --context-parallel-size 1, not "
                    f"{ctx.grid.cp.size}: its core attention takes whole sequences"
                )
            self.core = recompute.selective(self.capped)

    def capped(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int, packed: Packed,
        *, cache: Cache = None, window: int = 0,
    ) -> Tensor:  # fmt: skip
        """Attend with capped scores: qkv [s, b, (a + 2g) d / t] -> [s, b, a d / t]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in apply_rope(qkv, cos, sin, heads, groups))
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        b, _, s, d = q.shape
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        scores = (q @ k.mT).to(self.ctx.accumulate) * (d**-0.5 / self.cap)
        keys = torch.arange(k.shape[2], device=q.device)
        back = keys[-s:, None] - keys  # distance from a query back to a key
        hidden = (back < 0) | ((back >= window) if window else False)
        if packed is not None:
            lengths = torch.tensor(packed.lengths)
            of = torch.arange(len(lengths)).repeat_interleave(lengths).view(b, 1, s).to(q.device)
            hidden = hidden | (of[..., None] != of[..., None, :])
        weights = (self.cap * scores.tanh()).masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights.to(v.dtype) @ v).permute(2, 0, 1, 3).flatten(2)


class MLP(llama.MLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class Block(llama.Block):
    attention_type, mlp_type, norm_type = Attention, MLP, ResidualRMSNorm

    def __init__(self, config: Gemma2Config, ctx: LayerContext, recompute: Recompute) -> None:
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


class Gemma2(llama.Llama):
    config: Gemma2Config
    block, norm_type = Block, RMSNorm
    hf_modules = {
        **llama.Llama.hf_modules,
        "attention_out_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_out_norm": ("post_feedforward_layernorm",),
    }

    def layer_config(self, i: int) -> LlamaConfig:
        return replace(self.config, sliding_window=0) if i % 2 else self.config

    def initial_vector(self, name: str) -> float:
        return 0.0

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) * self.config.hidden_size**0.5

    def rope(self, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        cos, sin = super().rope(positions, length)
        scale = (self.config.head_size / self.config.query_pre_attn_scalar) ** 0.25
        return cos * scale, sin * scale  # scales q and k, so their product by its square

    def logits(self, h: Tensor) -> Tensor:
        y, cap = super().logits(h), self.config.final_logit_softcapping
        return cap * torch.tanh(y / cap) if cap else y


def hf_config(config: Gemma2Config, dtype: str = "float32") -> dict[str, Any]:
    own = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    own |= {name: getattr(config, name) or None for name in OWN}
    hf = llama.hf_config(config, dtype)
    del hf["hidden_act"]
    return {**hf, **own, "hidden_activation": "gelu_pytorch_tanh"}


def from_hf_config(hf: dict[str, Any]) -> Gemma2Config:
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(hf["num_hidden_layers"])]
    rules = {
        "hidden_act": lambda v: True,  # transformers reads hidden_activation
        "hidden_activation": lambda v: v in ("gelu_pytorch_tanh", None),
        "layer_types": lambda v: v in (kinds, None),
        "use_bidirectional_attention": lambda v: not v,
    }
    own = {name: hf.get(name, default) or 0 for name, default in OWN.items()}
    hf = filled(hf, DEFAULTS)
    return read_hf_config(hf, "gemma2", Gemma2Config, rules, **own)


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    for name in OWN:
        default = getattr(Gemma2Config, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)


Model, ModelConfig = Gemma2, Gemma2Config
