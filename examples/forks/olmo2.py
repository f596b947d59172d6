# SPDX-License-Identifier: Apache-2.0
"""OLMo 2: norms after attention and MLP, and norms over all queries and keys. (OLMo Team 2024)

    h = h + norm(attention(h));  h = h + norm(mlp(h))
    q = q / sqrt(mean(q^2) + eps) * w over all a heads at once, k over all g

A rank has a/t heads, so the mean needs a sum over the ranks in forward (reduce_from). Each rank
continues with only its own heads, so the gradient of the mean is a partial sum, which is summed in
backward (copy_to). The weights are sharded like the heads.
"""

from typing import Any

import torch
from torch import Tensor

from model import llama
from model.huggingface import filled
from model.llama import (
    Cache,
    LlamaConfig,
    Packed,
    hf_names,
    parameter_group,
    read_hf_config,
    with_mup,
)
from mpu.comm.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from mpu.context import LayerContext
from mpu.gradients import use
from mpu.layers.fused import RMSNorm
from mpu.layers.linear import column_vector
from mpu.recompute import Recompute

__all__ = [
    "Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group",
    "with_mup",
]  # fmt: skip


class WholeNorm(torch.nn.Module):
    """RMSNorm over the heads of all ranks. x: [s, b, n d] for the n heads of this rank.

    Ranks of a tp_kv group have the same heads.
    """

    def __init__(self, width: int, ctx: LayerContext, eps: float) -> None:
        super().__init__()
        self.ctx, self.eps, self.width = ctx, eps, width
        self.weight = column_vector(width, ctx=ctx)

    def forward(self, x: Tensor) -> Tensor:
        tp, w = self.ctx.tp, use(self.weight, self.ctx.sink)
        copies = x.shape[-1] // len(w)
        if copies > 1:
            w = gather_from_sequence_parallel_region(w, self.ctx.grid.tp_kv, self)
        squares = x.to(self.ctx.accumulate).square().sum(-1, keepdim=True) / copies
        squares = reduce_from_tensor_model_parallel_region(squares, tp, self)
        squares = copy_to_tensor_model_parallel_region(squares, tp, self)
        return (x * (squares / self.width + self.eps).rsqrt()).to(x.dtype) * w


class Attention(llama.Attention):
    def __init__(self, config: LlamaConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        d, eps = config.head_size, config.norm_epsilon
        self.q_norm = WholeNorm(config.num_attention_heads * d, ctx, eps)
        self.k_norm = WholeNorm(config.num_query_groups * d, ctx, eps)

    def project(self, x: Tensor) -> Tensor:
        sizes = [n * self.head_size for n in (self.heads, self.groups, self.groups)]
        q, k, v = self.qkv(x).split(sizes, -1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], -1)


class Block(llama.Block):
    attention_type = Attention
    norm_type = RMSNorm

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        h = h + self.attention_norm(self.attention(h, cos, sin, packed, cache))
        return h + self.mlp_norm(self.mlp(h))


class Olmo2(llama.Llama):
    block = Block
    hf_modules = {
        **llama.Llama.hf_modules,
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        "attention_norm": ("post_attention_layernorm",),
        "mlp_norm": ("post_feedforward_layernorm",),
    }


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    names = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    return {**llama.hf_config(config, dtype), **names}


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    return read_hf_config(filled(hf, {"rms_norm_eps": 1e-5}), "olmo2")


Model, ModelConfig = Olmo2, LlamaConfig
