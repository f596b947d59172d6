# SPDX-License-Identifier: Apache-2.0
"""A Llama whose layers 0, 2, 4, ... attend only to the last --window-size tokens.

`layer_config` returns the sizes of each layer. Hugging Face has no such model: its name is new.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

from model import llama
from model.llama import LlamaConfig, hf_names, parameter_group, read_hf_config, with_mup
from mpu.context import LayerContext
from mpu.recompute import Recompute

__all__ = [
    "Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group",
    "with_mup",
]  # fmt: skip


@dataclass(frozen=True)
class WindowsConfig(LlamaConfig):
    window_size: int = 0  # tokens to which a query attends; 0: all before it


class Attention(llama.Attention):
    def __init__(self, config: WindowsConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__(config, ctx, recompute)
        self.window = config.window_size


class Block(llama.Block):
    attention_type = Attention


class Windows(llama.Llama):
    block = Block

    def layer_config(self, i: int) -> LlamaConfig:
        return replace(self.config, window_size=0) if i % 2 else self.config


def hf_config(config: WindowsConfig, dtype: str = "float32") -> dict[str, Any]:
    own = {"model_type": "windows", "window_size": config.window_size}
    return {**llama.hf_config(config, dtype), **own}


def from_hf_config(hf: dict[str, Any]) -> WindowsConfig:
    return read_hf_config(hf, "windows", WindowsConfig, window_size=hf["window_size"])


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    """Add this model's own flags: one with the name of a field of the config sets it."""
    parser.add_argument("--window-size", type=int, default=0, help="of every other layer's window")


Model, ModelConfig = Windows, WindowsConfig
