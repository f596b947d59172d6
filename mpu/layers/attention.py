# SPDX-License-Identifier: Apache-2.0
"""Core attention: causal, grouped-query (Ainslie et al. 2023), on the heads of one rank.

It calls torch's scaled_dot_product_attention (flash kernels on CPU and CUDA).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.layers.fused import apply_rope


def core_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int, mask: Tensor | None
) -> Tensor:
    """Rotate q and k, then attend: qkv [s, b, (heads + 2 groups) d] -> [s, b, heads d].

    heads, groups: those of this rank. mask: None for plain causal, else bool [b, 1, s, s], True
    where a query may look.
    """
    s, b, _ = qkv.shape
    qkv = apply_rope(qkv.view(s, b, heads + 2 * groups, -1), cos, sin, heads + groups)
    q, k, v = qkv.permute(1, 2, 0, 3).split([heads, groups, groups], dim=1)  # each [b, n, s, d]
    return dot_product_attention(q, k, v, mask)


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v: q [b, a, s, d], k and v [b, g, S, d] -> [s, b, a d].

    mask: bool [b, 1, s, S], True where a query may look; without one, causal says whether a query
    looks at earlier keys only.
    """
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y.permute(2, 0, 1, 3).flatten(2)


def document_mask(document_ids: Tensor) -> Tensor:
    """Return the causal mask inside documents: document_ids [b, s] -> bool [b, 1, s, s]."""
    s = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(s, s, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal)[:, None]
