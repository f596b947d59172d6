# SPDX-License-Identifier: Apache-2.0
"""Arcee: a Llama whose MLP has no gate, down(max(up(x), 0)^2). (So et al. 2021, Primer)"""

from typing import Any

from torch import Tensor, nn

from model import llama
from model.huggingface import filled
from model.llama import LlamaConfig, hf_names, parameter_group, read_hf_config
from mpu.context import LayerContext
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig, ctx: LayerContext) -> None:
        super().__init__()
        h, f = config.hidden_size, config.ffn_hidden_size
        self.up = ColumnParallelLinear(h, f, ctx=ctx)
        self.down = RowParallelLinear(f, h, ctx=ctx)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu().square())


class Block(llama.Block):
    mlp_type = MLP


class Arcee(llama.Llama):
    block = Block
    hf_modules = {**llama.Llama.hf_modules, "mlp.up": ("mlp.up_proj",)}


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    names = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"}
    return {**llama.hf_config(config, dtype), **names}


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    hf = filled(hf, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5})
    return read_hf_config(hf, "arcee", rules={"hidden_act": lambda v: v == "relu2"})


Model, ModelConfig = Arcee, LlamaConfig
