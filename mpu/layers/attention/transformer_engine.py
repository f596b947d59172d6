# SPDX-License-Identifier: Apache-2.0
"""Core attention by Transformer Engine's DotProductAttention, for --core-attention-backend te.

It chooses between flash-attn, cuDNN and its own plain attention (its environment variables
NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN). Rotation, and generation of text, are those
of core.py.
"""

import importlib
from typing import Any

from torch import Tensor

from mpu.layers.attention.core import core_attention
from mpu.layers.fused import apply_rope
from mpu.layers.packed_seq_params import PackedSeqParams


class TransformerEngineAttention:
    """`core_attention` of a layer by Transformer Engine, whose module is made at the first call."""

    def __init__(self) -> None:
        self._modules: dict[tuple[int, int, int], Any] = {}

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        groups: int,
        packed: PackedSeqParams | None,
        *,
        cache: list[Tensor] | None = None,
        window: int = 0,
    ) -> Tensor:
        """Do `core_attention`: qkv [s, b, (heads + 2 groups) d] -> [s, b, heads d]."""
        if cache is not None:
            return core_attention(
                qkv, cos, sin, heads, groups, packed=packed, cache=cache, window=window
            )
        s, b, _ = qkv.shape
        q, k, v = apply_rope(qkv, cos, sin, heads, groups)  # each [s, b, n, d]
        attend = self._module(heads, q.shape[-1], groups)
        behind = (window - 1, 0) if window else (-1, 0)  # tokens before and after
        if packed is None:
            y: Tensor = attend(q, k, v, attn_mask_type="causal", window_size=behind)
            return y  # [s, b, heads d]
        q, k, v = (x.transpose(0, 1).reshape(b * s, *x.shape[2:]) for x in (q, k, v))
        y = attend(
            q, k, v,
            qkv_format="thd",
            cu_seqlens_q=packed.cu_seqlens, cu_seqlens_kv=packed.cu_seqlens,
            max_seqlen_q=packed.max_seqlen, max_seqlen_kv=packed.max_seqlen,
            attn_mask_type="padding_causal", window_size=behind,
        )  # fmt: skip
        return y.view(b, s, -1).transpose(0, 1)

    def _module(self, heads: int, head_size: int, groups: int) -> Any:
        """Return DotProductAttention for a rank's heads. It has no weights."""
        sizes = (heads, head_size, groups)
        if sizes not in self._modules:
            package = importlib.import_module("transformer_engine.pytorch")
            self._modules[sizes] = package.DotProductAttention(
                heads, head_size, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd"
            )
        return self._modules[sizes]
