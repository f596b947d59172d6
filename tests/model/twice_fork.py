# SPDX-License-Identifier: Apache-2.0
"""Llama, of which some weights are used several times in a forward: a model's file."""

import argparse
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from model import llama
from model.llama import Llama, LlamaConfig, hf_config, hf_names, parameter_group
from mpu.gradients import use
from mpu.param import Region

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


@dataclass(frozen=True)
class ModelConfig(LlamaConfig):
    twice: str = ""  # "module", "vector", "layers": what is used twice; "some": in some forwards


class Block(llama.Block):
    def __init__(self, config: ModelConfig, ctx: Any, recompute: Any) -> None:
        super().__init__(config, ctx, recompute)
        self.twice, self.ctx, self.calls = config.twice, ctx, 0
        if self.twice == "vector":
            self.shift = ctx.replicated_parameter((config.hidden_size,), Region.SEQUENCE_PARALLEL)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, packed: Any = None, cache: Any = None):
        x, h = self.attention_norm(h)
        x, h = self.mlp_norm(h, self.attention(x, cos, sin, packed, cache))
        y = self.mlp(x)
        self.calls += not x.is_meta
        if self.twice == "module" or (self.twice == "some" and self.calls % 2):
            y = self.mlp(x + y)
        if self.twice == "vector":
            y = (y + use(self.shift, self.ctx.sink)).tanh() + use(self.shift, self.ctx.sink)
        return h + y


class Model(Llama):
    block = Block

    def __init__(self, config: ModelConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        if config.twice == "layers":
            for number in ("0", "1"):
                if number in self.layers and "0" in self.layers:
                    self.layers[number].mlp = self.layers["0"].mlp


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--twice", default="", help="what a forward uses twice")


def from_hf_config(hf: dict[str, Any]) -> ModelConfig:
    read = llama.from_hf_config(hf)
    return ModelConfig(**{f.name: getattr(read, f.name) for f in fields(read)})
