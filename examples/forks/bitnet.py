# SPDX-License-Identifier: Apache-2.0
"""BitNet b1.58 with unpacked weights, as in transformers: a norm before the last matmul of each
branch, and an MLP with squared ReLU. (Ma et al. 2025, arXiv:2504.12285)

    h = h + proj(norm(attention(x)));  h = h + down(norm(relu(gate(x))^2 * up(x)))

The features of both norms are sharded over tp, so their mean square needs a sum over the ranks in
forward (reduce_from). Its gradient is a partial sum on each rank, summed in backward (copy_to).
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

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
    reduce_from_tensor_model_parallel_region,
)
from mpu.context import LayerContext
from mpu.gradients import use
from mpu.layers.linear import column_vector
from mpu.recompute import Recompute

__all__ = [
    "Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group",
    "with_mup",
]  # fmt: skip


class SubNorm(nn.Module):
    """RMSNorm over features that are sharded over tp: x [s, b, width / t]."""

    def __init__(self, width: int, ctx: LayerContext, eps: float) -> None:
        super().__init__()
        self.ctx, self.eps, self.width = ctx, eps, width
        self.weight = column_vector(width, ctx=ctx)

    def forward(self, x: Tensor) -> Tensor:
        squares = x.to(self.ctx.accumulate).square().sum(-1, keepdim=True)
        squares = reduce_from_tensor_model_parallel_region(squares, self.ctx.tp, self)
        squares = copy_to_tensor_model_parallel_region(squares, self.ctx.tp, self)
        scale = (squares / self.width + self.eps).rsqrt()
        return (x * scale).to(x.dtype) * use(self.weight, self.ctx.sink)


class Attention(llama.Attention):
    def __init__(self, config: LlamaConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        width = config.num_attention_heads * config.head_size
        self.sub_norm = SubNorm(width, ctx, config.norm_epsilon)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        qkv = self.project(x)
        y = self.core(qkv, cos, sin, self.heads, self.groups, packed, cache=cache)
        return self.proj(self.sub_norm(y))


class MLP(llama.MLP):
    def __init__(self, config: LlamaConfig, ctx: LayerContext) -> None:
        super().__init__(config, ctx)
        self.sub_norm = SubNorm(config.ffn_hidden_size, ctx, config.norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [s, b, f/t] each
        return self.down(self.sub_norm(F.relu(gate).square() * up))


class Block(llama.Block):
    attention_type, mlp_type = Attention, MLP


class BitNet(llama.Llama):
    block = Block
    hf_modules = {
        **llama.Llama.hf_modules,
        "attention.sub_norm": ("self_attn.attn_sub_norm",),
        "mlp.sub_norm": ("mlp.ffn_sub_norm",),
    }


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    own = {"architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "hidden_act": "relu2"}
    return {**llama.hf_config(config, dtype), **own}


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    hf = filled(hf, {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 5})
    return read_hf_config(hf, "bitnet", rules={"hidden_act": lambda v: v == "relu2"})


Model, ModelConfig = BitNet, LlamaConfig
