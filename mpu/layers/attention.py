# SPDX-License-Identifier: Apache-2.0
"""Core attention: causal, grouped-query (Ainslie et al. 2023), on the heads of one rank.

It calls torch's scaled_dot_product_attention (flash kernels on CPU and CUDA).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.layers.fused import apply_rope


def core_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    groups: int,
    mask: Tensor | None,
    *,
    cache: list[Tensor] | None = None,
    window: int = 0,
) -> Tensor:
    """Rotate q and k, then attend: qkv [s, b, (heads + 2 groups) d] -> [s, b, heads d].

    heads, groups: those of this rank. mask: None for plain causal, else bool [b, 1, s, s], True
    where a query may look. cache: when text is generated, the keys and values of the S - s tokens
    before these, to which this adds theirs. window: a query looks at itself and the window - 1
    tokens before it; 0: at all before it.
    """
    s, b, _ = qkv.shape
    qkv = apply_rope(qkv.view(s, b, heads + 2 * groups, -1), cos, sin, heads + groups)
    q, k, v = qkv.permute(1, 2, 0, 3).split([heads, groups, groups], dim=1)  # each [b, n, s, d]
    if cache is not None:
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)  # [b, g, S, d]
        cache[:] = [k, v]
    if window or k.shape[2] > s:
        seen = causal_mask(s, k.shape[2], window, q.device)
        mask = seen if mask is None else mask & seen
    return dot_product_attention(q, k, v, mask)


def causal_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return bool [queries, keys], True where a query may look; the queries are the last tokens."""
    at = torch.arange(keys, device=device)
    back = at[keys - queries :, None] - at  # how far back a key lies
    return (back >= 0) & (back < window) if window else back >= 0


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
