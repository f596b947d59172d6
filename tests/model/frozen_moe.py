# SPDX-License-Identifier: Apache-2.0
"""Experts, of which the parameters whose names a pattern finds are frozen: a model's file."""

import argparse
import re
from dataclasses import dataclass, fields
from typing import Any

from model import moe
from model.moe import MoE, MoEConfig, hf_config, hf_names, parameter_group

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]


@dataclass(frozen=True)
class ModelConfig(MoEConfig):
    frozen: str = "^$"


class Model(MoE):
    def __init__(self, config: ModelConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        for name, param in self.named_parameters():
            if re.search(config.frozen, name):
                param.requires_grad_(False)


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--frozen", default="^$", help="a pattern of the parameters to freeze")


def from_hf_config(hf: dict[str, Any]) -> ModelConfig:
    read = moe.from_hf_config(hf)
    return ModelConfig(**{f.name: getattr(read, f.name) for f in fields(read)})
