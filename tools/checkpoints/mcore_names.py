# SPDX-License-Identifier: Apache-2.0
"""Map the tensors of a Llama to those of megatron-core: fused, interleaved, padded.

In Megatron's tensors a query group's q, k and v are adjacent, and up follows gate; the vocabulary
is padded. A layer's norms have the names that Transformer Engine's fused layers give them,
whichever layers were used.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.llama import LlamaConfig
from model.load import ModelFile
from tools.checkpoints.convert_huggingface import expected_tensors
from training.checkpoint.huggingface import EMBEDDING, HEAD

LAYER, OURS = "decoder.layers.", "model.layers."
NORM = "model.norm.weight"
TOP = {
    EMBEDDING: "embedding.word_embeddings.weight",
    HEAD: "output_layer.weight",
    NORM: "decoder.final_layernorm.weight",
}
VOCABULARY = (TOP[EMBEDDING], TOP[HEAD])
QKV, FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
PROJ, FC2 = "self_attention.linear_proj.weight", "mlp.linear_fc2.weight"
INSIDE = {  # each layer's tensors; q, k, v and gate, up share one
    "input_layernorm.weight": f"{QKV}.layer_norm_weight",
    **{f"self_attn.{x}_proj.weight": f"{QKV}.weight" for x in "qkv"},
    **{f"self_attn.{x}_proj.bias": f"{QKV}.bias" for x in "qkv"},
    "self_attn.o_proj.weight": PROJ,
    **{f"self_attn.{x}_norm.weight": f"self_attention.{x}_layernorm.weight" for x in "qk"},
    "post_attention_layernorm.weight": f"{FC1}.layer_norm_weight",
    "mlp.gate_proj.weight": f"{FC1}.weight",
    "mlp.up_proj.weight": f"{FC1}.weight",
    "mlp.down_proj.weight": FC2,
}
QKV_ROWS = {"q_proj": slice(None, -2), "k_proj": slice(-2, -1), "v_proj": slice(-1, None)}


@dataclass(frozen=True)
class Theirs:
    """A parameter of Megatron's: of one layer, or of none. shape: without padding."""

    inside: str
    layer: int | None
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name with the layer's number."""
        return self.inside if self.layer is None else f"{LAYER}{self.layer}.{self.inside}"


class Names:
    """Both tables of names of one model, and the conversion of values between them.

    shapes: {canonical name: shape}. Raises ValueError for a tensor that megatron-core's dense Llama
    does not have.
    """

    def __init__(self, file: ModelFile, config: LlamaConfig) -> None:
        self.config = config
        self.shapes = expected_tensors(file, config)
        for name in self.shapes:
            if name not in TOP and _inside(name) not in INSIDE:
                raise ValueError(
                    f"{name}: only tensors of a dense Llama are converted from and to Megatron's "
                    "names; go through Hugging Face's format for others"
                )
        c, h, d = config, config.hidden_size, config.head_size
        rows = (c.num_attention_heads + 2 * c.num_query_groups) * d
        self.inside = {
            f"{QKV}.layer_norm_weight": (h,),
            f"{QKV}.weight": (rows, h),
            f"{QKV}.bias": (rows,),
            PROJ: (h, c.num_attention_heads * d),
            **{f"self_attention.{x}_layernorm.weight": (d,) for x in "qk"},
            f"{FC1}.layer_norm_weight": (h,),
            f"{FC1}.weight": (2 * c.ffn_hidden_size, h),
            FC2: (h, c.ffn_hidden_size),
        }
        there = {INSIDE[_inside(name)] for name in self.shapes if name not in TOP}
        self.inside = {name: shape for name, shape in self.inside.items() if name in there}

    def theirs(self, name: str) -> Theirs:
        """Return the parameter that holds a canonical tensor."""
        if name in TOP:
            return Theirs(TOP[name], None, self.shapes[name])
        inside = INSIDE[_inside(name)]
        return Theirs(inside, int(name.split(".")[2]), self.inside[inside])

    def every(self) -> list[Theirs]:
        """Return all parameters, each once."""
        return list(dict.fromkeys(self.theirs(name) for name in self.shapes))

    def part(self, name: str, fused: Tensor) -> Tensor:
        """Return a canonical tensor's values from those of the parameter that holds it."""
        kind, shape = name.split(".")[-2], self.shapes[name]
        if kind in QKV_ROWS:  # [g (a/g + 2) d, h] -> [g, a/g + 2, d, h]
            groups, d = self.config.num_query_groups, self.config.head_size
            fused = fused.view(groups, -1, d, *shape[1:])[:, QKV_ROWS[kind]]
        elif kind in ("gate_proj", "up_proj"):
            fused = fused.view(2, *shape)[int(kind == "up_proj")]
        return fused.reshape(shape).contiguous()

    def fused(self, theirs: Theirs, read: Callable[[str], Tensor]) -> Tensor:
        """Return a parameter's values from canonical tensors, which `read` returns by name."""
        if theirs.layer is None:
            return read(next(name for name, inside in TOP.items() if inside == theirs.inside))
        layer = f"{OURS}{theirs.layer}."
        parts = [layer + own for own, inside in INSIDE.items() if inside == theirs.inside]
        if theirs.inside.startswith(QKV) and len(parts) == 3:
            groups, d = self.config.num_query_groups, self.config.head_size
            each = [read(n).view(groups, -1, d, *theirs.shape[1:]) for n in parts]
            return torch.cat(each, dim=1).reshape(theirs.shape)
        return torch.cat([read(name) for name in parts])


def _inside(name: str) -> str:
    """Return a canonical name without its layer: "mlp.up_proj.weight"."""
    return name.removeprefix(OURS).partition(".")[2]
