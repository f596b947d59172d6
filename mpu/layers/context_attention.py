# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: attention where each rank has a part of every row of tokens.

A rank has the queries, keys and values of its tokens (mpu/layers/attention/shards.py) and needs the
keys and values before them. --cp-comm-type selects how it receives them:

    all_gather   K and V are gathered under the attention to own keys; again in backward, which
                 reduce-scatters dK and dV in rank order            (Llama Team 2024, section 3.3.2)
    p2p          K and V move around a ring; a rank attends to one part while the next is in flight.
                 In backward dK and dV follow them                                (Liu et al. 2023)
    a2a          all-to-all from all heads of some tokens to all tokens of some heads, and back
                                                                               (Jacobs et al. 2023)

Blocks of attention are merged by log-sum-exp (attention/block_attention.py): no mask, any lengths.
"""

from typing import Any

import torch
from torch import Tensor

from mpu.comm.collectives import all_to_all
from mpu.comm.transport import Axis, Label
from mpu.context import LayerContext
from mpu.layers.attention.backends import card_of
from mpu.layers.attention.core import CoreAttention, one_row
from mpu.layers.attention.kv_exchange import (
    BACKWARD,
    FORWARD,
    ContextExchange,
    Gather,
    Ring,
    by_rank,
    in_order,
)
from mpu.layers.attention.max_logits import HeadMaxima, head_maxima_of, note_rows
from mpu.layers.attention.shards import Ranges, batch_shards, documents_of_rows
from mpu.layers.attention.transformer_engine import TransformerEngineAttention
from mpu.layers.packed_seq_params import PackedSeqParams

COMM_TYPES = ("p2p", "all_gather", "a2a")
Order = tuple[Tensor, Tensor]  # indexes into tokens: see in_order


def core_attention_of(ctx: LayerContext) -> CoreAttention:
    """Return a layer's core attention, with the kernels that --attention-backend selects.

    It is a TransformerEngineAttention for te, and a ContextAttention if cp > 1.
    """
    if ctx.attention_backend == "te":
        return TransformerEngineAttention(head_maxima_of(ctx))
    if ctx.grid.cp.size > 1:
        return ContextAttention(ctx)
    return CoreAttention(ctx.attention_backend, card_of(ctx.device), head_maxima_of(ctx))


class ContextAttention(CoreAttention):
    """`CoreAttention` of a layer whose rows of tokens are cut over cp ranks."""

    def __init__(self, ctx: LayerContext) -> None:
        super().__init__(ctx.attention_backend, card_of(ctx.device), head_maxima_of(ctx))
        self.kind, self.cp = ctx.cp_comm_type, ctx.grid.cp

    def note(
        self,
        maxima: HeadMaxima,
        q: Tensor,
        k: Tensor,
        packed: PackedSeqParams | None,
        window: int,
    ) -> None:
        """Do nothing: `exchange` records them, as this rank does not have all keys yet."""

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
        """Attend to this rank's tokens: q [s/cp, b, a, d], k [s/cp, b, g, d], v [s/cp, b, g, e] ->
        [s/cp, b, a e].

        packed: the documents of the whole rows [b, s]. Raises ValueError if they are missing or do
        not fill the rows, or if heads do not divide over the ranks of an all-to-all.
        """
        s, b = q.shape[:2]
        over = f"--context-parallel-size {self.cp.size}"
        if cache is not None:
            raise ValueError(f"{over}: must be 1 to generate text")
        if packed is None:
            raise ValueError(f"{over}: packed_seq_params, the documents of whole rows, is missing")
        rows = documents_of_rows(packed.sharded or packed.lengths, b)
        if sum(rows[0]) != s * self.cp.size:
            raise ValueError(
                f"rows of {sum(rows[0])} tokens over {self.cp.size} context-parallel ranks: this "
                f"rank has {s} tokens of each row, not {sum(rows[0])} / {self.cp.size}"
            )
        one_document = len(packed.lengths) == b  # each row is one document
        if not one_document:
            q, k, v = (one_row(x) for x in (q, k, v))
        documents = rows[0] if one_document else packed.lengths
        ranges = batch_shards(self.cp.size, rows[:1] if one_document else rows)
        one = None if one_document else packed
        y = self.exchange(
            q, k, v, ranges, packed=one, documents=documents, window=window, sink=sink
        ).flatten(2)
        return y if one_document else y.view(b, s, -1).transpose(0, 1)

    def exchange(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranges: tuple[Ranges, ...],
        packed: PackedSeqParams | None,
        documents: tuple[int, ...],
        window: int,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Attend: q [s, b, a, d], k [s, b, g, d], v [s, b, g, e] of this rank -> [s, b, a, e]."""
        kernel = self.kernel(q, v, "blocks" if packed is None and not window else "documents")
        noted, heads = None, q.shape[2]
        by_heads = self.kind == "a2a"
        own = heads // self.cp.size if by_heads else heads
        first = own * self.cp.rank if by_heads else 0
        if self.maxima is not None and torch.is_grad_enabled():
            noted = self.maxima.of(own, first, heads)
        if not by_heads:
            kind = Gather if self.kind == "all_gather" else Ring
            way = kind(self.cp, ranges, documents, window, kernel, noted)
            return ContextExchange.apply(q, k, v, way, sink)
        order = in_order(ranges, q.device), by_rank(ranges, q.device)
        q, k, v = heads_for_tokens(q, k, v, self.cp, order)
        sink = None if sink is None else sink[first : first + own]
        if noted is not None:
            whole = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3)
            note_rows(noted, *whole, packed, window)
        y = super().compute(q, k, v, packed, cache=None, window=window, sink=sink)
        return _Exchange.apply(y.unflatten(2, (q.shape[2], -1)), self.cp, order, True)


def replicated(x: Tensor, heads: int, ranks: int) -> Tensor:
    """Return keys or values [s, b, g, d], with heads repeated if there are fewer than ranks.

    Each rank that has queries of a head gets a copy; autograd sums the copies' gradients. heads:
    the number of query heads. Raises ValueError if heads do not divide over the ranks.
    """
    groups = x.shape[2]
    if heads % ranks or (groups % ranks and ranks % groups):
        raise ValueError(
            f"--cp-comm-type a2a over {ranks} ranks: a tensor-parallel rank has {heads} attention "
            f"heads, which must be a multiple of {ranks}, and {groups} query groups, which must be "
            "a multiple or a divisor of it"
        )
    return x if groups % ranks == 0 else x.repeat_interleave(ranks // groups, 2)


def heads_for_tokens(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, order: Order
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange q [s, b, a, d], k [s, b, g, d] and v [s, b, g, e] for 1/A of the heads of all A
    ranks' tokens.

    Returns q [A s, b, a / A, d], and k and v with at least one head. order: see `in_order`.
    """
    k, v = (replicated(x, q.shape[2], axis.size) for x in (k, v))
    slices = [x.unflatten(2, (axis.size, -1)) for x in (q, k, v)]  # [s, b, A, n / A, d]
    features = [x[0, 0, 0].numel() for x in slices]
    x = torch.cat([x.flatten(3) for x in slices], 3)
    parts = _Exchange.apply(x, axis, order, False)[:, :, 0].split(features, 2)
    shaped = zip(parts, slices, strict=True)
    q, k, v = (part.unflatten(2, each.shape[3:]) for part, each in shaped)
    return q, k, v


class _Exchange(torch.autograd.Function):
    """All-to-all from all heads of this rank's tokens to 1/A of the heads of all tokens, in order
    of position: [s, b, n, d] -> [A s, b, n / A, d]; back: the inverse. Backward does the inverse.
    """

    @staticmethod
    def forward(saved_ctx: Any, x: Tensor, axis: Axis, order: Order, back: bool) -> Tensor:
        saved_ctx.way = axis, order, back
        return _exchanged(x, axis, order, back, FORWARD)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        axis, order, back = saved_ctx.way
        return _exchanged(dy, axis, order, not back, BACKWARD), None, None, None


def _exchanged(x: Tensor, axis: Axis, order: Order, back: bool, label: Label) -> Tensor:
    if back:
        slices = x.index_select(0, order[1]).unflatten(0, (axis.size, -1))
    else:
        slices = x.unflatten(2, (axis.size, -1)).movedim(2, 0).contiguous()
    every = all_to_all(slices, axis, label=label)[0]
    del slices
    if back:
        return every.movedim(0, 2).flatten(2, 3)
    return every.flatten(0, 1).index_select(0, order[0])
