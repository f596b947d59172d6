# SPDX-License-Identifier: Apache-2.0
"""A fork for tests whose layers read the first layer's values, which travel in the hidden states.

    hidden [s/t, b, h + w]   w: this rank's values of s/t tokens, or with sequence parallelism of s:
                             each tensor-parallel rank sends its own

Each layer mixes them into its own values, and adds an auxiliary loss. (Zhou et al. 2024, Value
residual learning)
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model import llama
from model.llama import Cache, LlamaConfig, Packed, hf_names, parameter_group, read_hf_config
from mpu.context import LayerContext
from mpu.gradients import use
from mpu.layers.fused import RMSNorm
from mpu.param import Region
from mpu.recompute import Recompute

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


@dataclass(frozen=True)
class ValueConfig(LlamaConfig):
    square_loss: float = 0.01


@dataclass(frozen=True)
class LayerConfig(ValueConfig):
    first: bool = False


def parts(ctx: LayerContext) -> int:
    return ctx.tp.size if ctx.sp else 1


class Attention(llama.Attention):
    def __init__(self, config: LayerConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        self.mix = None if config.first else ctx.replicated_parameter((2,), Region.TENSOR_PARALLEL)

    def of(self, x: Tensor, values: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        """Return what attention returns, and the first layer's values [s, b, g d / t]."""
        cos, sin, packed, cache = rest
        sizes = [n * self.head_size for n in (self.heads, self.groups, self.groups)]
        q, k, v = self.qkv(x).split(sizes, -1)
        first = v if values is None else values
        if self.mix is not None:
            a, b = use(self.mix, self.ctx.sink).unbind()
            v = a * v + b * first
        qkv = torch.cat([q, k, v], -1)
        y = self.core(qkv, cos, sin, self.heads, self.groups, packed, cache=cache)
        return self.proj(y), first


class Block(llama.Block):
    attention_type, norm_type = Attention, RMSNorm

    def __init__(self, config: LayerConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        self.hidden, self.ctx, self.loss = config.hidden_size, ctx, config.square_loss

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        t, values = parts(self.ctx), None
        if self.attention.mix is not None:
            values = h[..., self.hidden :].unflatten(-1, (t, -1)).transpose(1, 2).flatten(0, 1)
            h = h[..., : self.hidden]
        y, values = self.attention.of(self.attention_norm(h), values, cos, sin, packed, cache)
        h = h + y
        h = h + self.mlp(self.mlp_norm(h))
        h = self.ctx.auxiliary_loss(h, self.loss * h.square().mean(-1).sum())
        return torch.cat([h, values.unflatten(0, (-1, t)).transpose(1, 2).flatten(2)], -1)


class Model(llama.Llama):
    block = Block

    def layer_config(self, i: int) -> LlamaConfig:
        return LayerConfig(**vars(self.config), first=i == 0)

    def last_norm(self, h: Tensor) -> Tensor:
        return super().last_norm(h[..., : self.config.hidden_size])

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int, int]:
        s, b, h = super().hidden_shape(batch, length)
        groups = max(self.config.num_query_groups // self.ctx.tp.size, 1)
        return s, b, h + groups * self.config.head_size * parts(self.ctx)


def hf_config(config: ValueConfig, dtype: str = "float32") -> dict[str, Any]:
    own = {"model_type": "value_residual", "square_loss": config.square_loss}
    return {**llama.hf_config(config, dtype), **own}


def from_hf_config(hf: dict[str, Any]) -> ValueConfig:
    return read_hf_config(hf, "value_residual", ValueConfig, square_loss=hf["square_loss"])


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--square-loss", type=float, default=0.01)


ModelConfig = ValueConfig
