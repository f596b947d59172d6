# SPDX-License-Identifier: Apache-2.0
"""Core attention by Transformer Engine's DotProductAttention, for --attention-backend te.

It chooses between flash-attn, cuDNN and its own unfused attention (its environment variables
NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN). Rotation and text generation use core.py.
"""

import importlib
from typing import Any

from torch import Tensor

from mpu.layers.attention.backends import FLAG
from mpu.layers.attention.core import CoreAttention, core_attention, one_row
from mpu.layers.attention.max_logits import HeadMaxima
from mpu.layers.packed_seq_params import PackedSeqParams


class TransformerEngineAttention(CoreAttention):
    """`CoreAttention` by Transformer Engine, whose modules are made at the first call."""

    def __init__(self, maxima: HeadMaxima | None = None) -> None:
        super().__init__("te", maxima=maxima)
        self._modules: dict[tuple[int, int, int, int], Any] = {}

    def compute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: PackedSeqParams | None,
        cache: list[Tensor] | None,
        window: int,
        sink: Tensor | None,
    ) -> Tensor:
        """Compute `attend`: q [s, b, a, d], k [s, b, g, d], v [s, b, g, e] -> [s, b, a e]."""
        if cache is not None:
            return core_attention.compute(q, k, v, packed, cache, window=window, sink=sink)
        if sink is not None:
            raise ValueError(f"{FLAG} te: attention sinks are not available; use auto")
        s, b, heads, size = q.shape
        module = self._module(heads, size, k.shape[2], v.shape[3])
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

    def _module(self, heads: int, head_size: int, groups: int, value_size: int) -> Any:
        """Return DotProductAttention for a rank's heads. It has no weights."""
        sizes = (heads, head_size, groups, value_size)
        if sizes not in self._modules:
            package = importlib.import_module("transformer_engine.pytorch")
            channels = head_size if value_size == head_size else (head_size, value_size)
            self._modules[sizes] = package.DotProductAttention(
                heads, channels, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd"
            )
        return self._modules[sizes]
