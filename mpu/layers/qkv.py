# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values, also with fewer key/value heads than tensor-parallel ranks.

A rank has a/t query heads, and all of them attend with one key/value head if t is a multiple of g.
So t/g adjacent ranks, the axis tp_kv, need the same head. Its weight is cut over them like every
other, so that each weight has one owner and one gradient. Only the head's output is replicated:

    qkv          [s, b, (a + 2g) d/t]     d g/t columns of a key head and of a value head
    forward      gathered over tp_kv      the whole key head and the whole value head
    backward     summed and scattered     each rank of tp_kv has the gradient of its own queries

A rank sends 2 s b d (1 - g/t) elements per layer each way, and no key or value is computed twice.
(Megatron-LM gathers too, but over all of tp and including the queries, then selects its part.)
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mpu.comm.mappings import gather_from_sequence_parallel_region
from mpu.context import LayerContext
from mpu.layers.attention.max_logits import max_logits_of
from mpu.layers.linear import ColumnParallelLinear, Operands
from mpu.param import placement_of


def local_heads(heads: int, groups: int, head_size: int, ctx: LayerContext) -> tuple[int, int]:
    """Return the numbers of query heads and of key/value heads that a rank attends with.

    Raises ValueError if they do not divide over the tensor-parallel ranks.
    """
    t, shared = ctx.tp.size, ctx.grid.tp_kv.size
    if heads % t or (groups % t and t % groups):
        raise ValueError(
            f"{heads} attention heads in {groups} query groups do not divide over "
            f"tensor-parallel size {t}: heads must be a multiple of {t}, and groups a multiple or "
            f"a divisor of {t}"
        )
    if shared != max(1, t // groups):
        raise ValueError(
            f"{groups} query groups on {t} tensor-parallel ranks: the grid was made for another "
            f"--num-query-groups, where {shared} ranks share a key/value head; all layers must "
            "have the same"
        )
    if head_size % shared:
        raise ValueError(
            f"a head of size {head_size} in {groups} query groups is cut over {shared} of the {t} "
            f"tensor-parallel ranks, so its size must be a multiple of {shared}"
        )
    return heads // t, max(1, groups // t)


def qkv_linear(
    hidden: int, sections: Sequence[int], *, ctx: LayerContext, bias: bool = False
) -> ColumnParallelLinear:
    """Return the layer that computes q, k and v, with the full sizes `sections`, head by head.

    x [s/t, b, h] (SP) or [s, b, h] -> [s, b, (heads + 2 groups) d], with the numbers of
    `local_heads`.
    """
    kind = ColumnParallelLinear if ctx.grid.tp_kv.size == 1 else SharedHeadsLinear
    layer = kind(hidden, sections, ctx=ctx, bias=bias)
    if (logits := max_logits_of(ctx)) is not None:
        logits.linears.append(layer)
    layer.weight.placement = replace(placement_of(layer.weight), qkv=True)  # type: ignore[attr-defined]
    return layer


class SharedHeadsLinear(ColumnParallelLinear):
    """A column-parallel linear for q, k and v whose key/value head is shared by ranks of tp_kv."""

    def output_sections(self) -> list[tuple[int, int]]:
        """Return, for each of q, k and v, (features of all ranks, features of this one)."""
        shared = self.ctx.grid.tp_kv.size
        q, k, v = super().output_sections()
        return [q, (k[0], k[1] * shared), (v[0], v[1] * shared)]

    def forward(self, x: Tensor, operands: Operands | None = None) -> Tensor:
        """Multiply, then gather the heads of k and v over tp_kv."""
        return self.whole_heads(super().forward(x, operands))

    def whole_heads(self, y: Tensor) -> Tensor:
        """Gather the heads of k and v: [s, b, (a + 2g) d/t] -> [s, b, (a/t + 2) d]."""
        axis, t = self.ctx.grid.tp_kv, self.ctx.tp.size
        k, v = (size // t for size in placement_of(self.weight).sections[-2:])
        q, kv = y.split([y.shape[-1] - k - v, k + v], dim=-1)
        every = gather_from_sequence_parallel_region(kv.contiguous(), axis, self)
        parts = every.unflatten(0, (axis.size, -1)).split([k, v], dim=-1)  # [t/g, s, b, d g/t]
        heads = (part.permute(1, 2, 0, 3).flatten(2) for part in parts)  # [s, b, d]
        return torch.cat([q, *heads], dim=-1)


def add_bias(layer: ColumnParallelLinear, y: Tensor, bias: Tensor) -> Tensor:
    """Add a bias to the output y of a `qkv_linear`. The bias is cut like the rows of the layer's
    weight; if ranks share a head, its parts for k and v are gathered as well.
    """
    if isinstance(layer, SharedHeadsLinear):
        bias = layer.whole_heads(bias[None, None])[0, 0]
    return y + bias
