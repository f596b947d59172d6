# SPDX-License-Identifier: Apache-2.0
"""A Llama whose embedding and output layer are matrices for the optimizer: both are padded."""

from torch import nn

from model.llama import Model, ModelConfig, from_hf_config, hf_config, hf_names

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


def parameter_group(name: str, param: nn.Parameter) -> str:
    return "matrix" if param.dim() > 1 else "vector"
