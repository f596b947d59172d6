# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense: a Llama that normalises each head's queries and keys. Only the differences.

    q, k [s, b, n/t, d] -> RMSNorm over d, the same weight for every head -> RoPE -> attention

A rank applies these norms only to its own heads, so their gradients are partial over tp: they are
in Region.TENSOR_PARALLEL. (Qwen3 technical report, 2025; Henry et al. 2020, Query-key
normalization)
"""

from typing import Any

import torch
from torch import Tensor

from model import llama
from model.huggingface import filled, no_windows, unread, without
from model.llama import LlamaConfig, hf_names, parameter_group, read_hf_config, with_mup
from mpu.context import LayerContext
from mpu.layers.fused import RMSNorm
from mpu.param import Region
from mpu.recompute import Recompute

# defaults of fields that are missing in a config.json
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768}
UNREAD = ("mlp_bias",)  # fields of a Llama that transformers' Qwen3 does not have
__all__ = [
    "Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group",
    "with_mup",
]  # fmt: skip


class Attention(llama.Attention):
    """Grouped-query attention with normalised queries and keys. Raises ValueError for --qk-clip."""

    def __init__(self, config: LlamaConfig, ctx: LayerContext, recompute: Recompute) -> None:
        if ctx.qk_clip is not None:
            raise ValueError(
                "--qk-clip: this model normalises queries and keys, which undoes the scaling of "
                "their weights: omit the flag; --log-max-attention-logit shows the largest logit"
            )
        super().__init__(config, ctx, recompute)
        d, eps, region = config.head_size, config.norm_epsilon, Region.TENSOR_PARALLEL
        self.q_norm = RMSNorm(d, ctx=ctx, eps=eps, region=region)
        self.k_norm = RMSNorm(d, ctx=ctx, eps=eps, region=region)

    def project(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> queries, keys (both normalised) and values [s, b, (a + 2g) d / t]."""
        a, g = self.heads, self.groups
        qkv = self.qkv(x).unflatten(-1, (a + 2 * g, self.head_size))  # [s, b, (a + 2g) / t, d]
        q, k, v = qkv.split([a, g, g], dim=2)
        q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())  # for csrc/fused.cpp
        return torch.cat([q, k, v], dim=2).flatten(2)


class Block(llama.Block):
    """One transformer layer, pre-norm."""

    attention_type = Attention


class Qwen3(llama.Llama):
    """The model, or this pipeline rank's stages of it; see model/llama.py."""

    block = Block
    hf_modules = {
        **llama.Llama.hf_modules,
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
    }


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return Hugging Face's config.json of the same model."""
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return without(UNREAD, {**llama.hf_config(config, dtype), **names})


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    """Read a Hugging Face config.json of a dense Qwen3; reject what this file does not compute.

    Raises ValueError naming the field, its value and what is supported.
    """
    hf = filled(hf, DEFAULTS)
    rules = unread(UNREAD) | {"use_sliding_window": lambda v: not v or no_windows(hf)}
    config: LlamaConfig = read_hf_config(hf, "qwen3", rules=rules)
    return config


Model, ModelConfig = Qwen3, LlamaConfig
