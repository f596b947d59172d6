# SPDX-License-Identifier: Apache-2.0
"""Phi-3: a Llama whose checkpoints have q, k and v in one tensor, and gate and up in one.

Parts of a parameter with the same name in `hf_modules` are one tensor, stacked by rows. So `--load`
reads such checkpoints, and saved checkpoints have this form.
"""

from typing import Any

from model import llama
from model.huggingface import filled, window_rule
from model.llama import LlamaConfig, hf_names, parameter_group, read_hf_config, with_mup

__all__ = [
    "Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group",
    "with_mup",
]  # fmt: skip


class Phi3(llama.Llama):
    hf_modules = {
        **llama.Llama.hf_modules,
        "attention.qkv": ("self_attn.qkv_proj",) * 3,
        "mlp.gate_up": ("mlp.gate_up_proj",) * 2,
    }


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    names = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    return {**llama.hf_config(config, dtype), **names}


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    hf = filled(hf, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5})
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop"), lambda v: not v)
    return read_hf_config(hf, "phi3", rules=window_rule(hf) | dropout)


Model, ModelConfig = Phi3, LlamaConfig
