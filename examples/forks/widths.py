# SPDX-License-Identifier: Apache-2.0
"""A Llama whose MLPs widen with depth, to f in the last layer. (Mehta et al. 2024, OpenELM)

Pipeline balancing and the dry run use the actual sizes of each layer.
"""

from dataclasses import replace
from typing import Any

from model import llama
from model.llama import LlamaConfig, hf_names, parameter_group, read_hf_config, with_mup

__all__ = [
    "Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group",
    "with_mup",
]  # fmt: skip


class Widths(llama.Llama):
    def layer_config(self, i: int) -> LlamaConfig:
        f, share = self.config.ffn_hidden_size, (i + 1) / self.config.num_layers
        return replace(self.config, ffn_hidden_size=max(4, 4 * round(f * share / 4)))


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    return {**llama.hf_config(config, dtype), "model_type": "widths"}


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    return read_hf_config(hf, "widths")


Model, ModelConfig = Widths, LlamaConfig
