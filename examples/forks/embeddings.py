# SPDX-License-Identifier: Apache-2.0
"""A Llama of which only the embeddings train, as for a new vocabulary. (Artetxe et al. 2020)"""

from typing import Any

from model import llama
from model.llama import LlamaConfig, from_hf_config, hf_config, hf_names, parameter_group

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


class Embeddings(llama.Llama):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, param in self.named_parameters():
            param.requires_grad_(name in ("embedding.weight", "head.weight"))


Model, ModelConfig = Embeddings, LlamaConfig
