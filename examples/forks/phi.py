# SPDX-License-Identifier: Apache-2.0
"""Phi 1 and 2: attention and MLP in parallel, LayerNorm, biases. (Li et al. 2023)

    x = norm(h);  h = h + attention(x) + mlp(x)

RoPE rotates the first `rotary_factor` of each head. Every linear layer has a bias, also the head.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from model import llama
from model.huggingface import read_rope
from model.llama import Cache, LlamaConfig, Packed, hf_names, parameter_group, read_hf_config
from mpu.context import LayerContext
from mpu.gradients import use
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.param import Region
from mpu.recompute import Recompute

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


@dataclass(frozen=True)
class PhiConfig(LlamaConfig):
    rotary_factor: float = 0.5  # share of a head that RoPE rotates

    @property
    def rotary_size(self) -> int:
        return int(self.head_size * self.rotary_factor) // 2 * 2


class LayerNorm(nn.Module):
    def __init__(self, width: int, *, ctx: LayerContext, eps: float) -> None:
        super().__init__()
        self.ctx, self.eps = ctx, eps
        self.weight = ctx.replicated_parameter((width,), Region.SEQUENCE_PARALLEL)
        self.bias = ctx.replicated_parameter((width,), Region.SEQUENCE_PARALLEL)

    def forward(self, x: Tensor) -> Tensor:
        w, b = use(self.weight, self.ctx.sink), use(self.bias, self.ctx.sink)
        return F.layer_norm(x, w.shape, w, b, self.eps)


class Attention(llama.Attention):
    qkv_bias = proj_bias = True


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig, ctx: LayerContext) -> None:
        super().__init__()
        h, f = config.hidden_size, config.ffn_hidden_size
        self.up = ColumnParallelLinear(h, f, ctx=ctx, bias=True)
        self.down = RowParallelLinear(f, h, ctx=ctx, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__()
        self.norm = LayerNorm(config.hidden_size, ctx=ctx, eps=config.norm_epsilon)
        self.attention = Attention(config, ctx, recompute)
        self.mlp = MLP(config, ctx)

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        x = self.norm(h)
        return h + self.attention(x, cos, sin, packed, cache) + self.mlp(x)


class Phi(llama.Llama):
    block, norm_type, head_bias = Block, LayerNorm, True
    hf_modules = {
        "norm": ("input_layernorm",),
        "attention.qkv": llama.Llama.hf_modules["attention.qkv"],
        "attention.proj": ("self_attn.dense",),
        "mlp.up": ("mlp.fc1",),
        "mlp.down": ("mlp.fc2",),
    }
    hf_ends = {**llama.Llama.hf_ends, "norm": "model.final_layernorm"}


def hf_config(config: PhiConfig, dtype: str = "float32") -> dict[str, Any]:
    hf = llama.hf_config(config, dtype)
    hf["layer_norm_eps"] = hf.pop("rms_norm_eps")
    return {
        **hf,
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "partial_rotary_factor": config.rotary_factor,
    }


def from_hf_config(hf: dict[str, Any]) -> PhiConfig:
    rope = read_rope(hf)
    factor = rope.get("partial_rotary_factor", 0.5)
    rules = {
        "partial_rotary_factor": lambda v: True,
        "hidden_act": lambda v: v in ("gelu_new", "gelu_pytorch_tanh"),
        **dict.fromkeys(("qk_layernorm", "resid_pdrop", "embd_pdrop"), lambda v: not v),
    }
    hf = {**hf, "rms_norm_eps": hf.get("layer_norm_eps", 1e-5)}
    return read_hf_config(hf, "phi", PhiConfig, rules, rotary_factor=factor)


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rotary-factor", type=float, default=0.5, help="share that RoPE turns")


Model, ModelConfig = Phi, PhiConfig
