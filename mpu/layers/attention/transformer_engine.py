# SPDX-License-Identifier: Apache-2.0
"""Core attention by Transformer Engine's DotProductAttention, for --attention-backend te.

It chooses between flash-attn, cuDNN and its own plain attention (its environment variables
NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN). Rotation, and generation of text, are those
of core.py.
"""

import importlib
from typing import Any

from torch import Tensor

from mpu.layers.attention.core import CoreAttention, core_attention, one_row
from mpu.layers.attention.max_logits import HeadMaxima
from mpu.layers.packed_seq_params import PackedSeqParams


class TransformerEngineAttention(CoreAttention):
    """`CoreAttention` by Transformer Engine, whose module is made at the first call."""

    def __init__(self, maxima: HeadMaxima | None = None) -> None:
        super().__init__("te", maxima=maxima)
        self._modules: dict[tuple[int, int, int], Any] = {}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: PackedSeqParams | None,
        cache: list[Tensor] | None,
        window: int,
    ) -> Tensor:
        """q [s, b, a, d], k and v [s, b, g, d] -> [s, b, a d]."""
        if cache is not None:
            return core_attention.attend(q, k, v, packed, cache, window)
        s, b, heads, size = q.shape
        module = self._module(heads, size, k.shape[2])
        behind = (window - 1, 0) if window else (-1, 0)  # tokens before and after
        if packed is None:
            y: Tensor = module(q, k, v, attn_mask_type="causal", window_size=behind)
            return y  # [s, b, heads d]
        y = module(
            *(one_row(x)[:, 0] for x in (q, k, v)),
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
