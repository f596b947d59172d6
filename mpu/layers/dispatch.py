# SPDX-License-Identifier: Apache-2.0
"""Bring each token to its experts, and its experts' outputs back.

    T tokens of this rank, k experts a token, E experts, n rows: pairs of a token and an expert of
    this rank, in the order of (expert, token)

    Dispatcher.plan     choice [T, k] -> a Plan: which row is whose. It is data, decided once
    Dispatcher.rows     x [T, h] -> [n, h]
    Dispatcher.combine  [n, h], weights [T, k] -> y [T, h], y_t = sum over j of weights_tj row_tj

    Dispatcher          ep 1: nothing travels
    AllGather           every rank gets the tokens of all ranks of ep, takes the rows of its
                        experts, and the partial y are summed in rank order
    AllToAll            every token goes to the ranks of its experts only, and back

Rows are sorted stably, and a token's outputs are added in the order of j, in the accumulation
dtype. Nothing is added by scatter, so the bits do not depend on the device's order of threads.
Gradients travel the same ways back: that of a gather is a sum in rank order, that of an exchange
the exchange reversed. AllToAll needs the sizes of what it sends on the host, and so do the products
of experts: one wait for the device a layer.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpu.comm.collectives import all_gather
from mpu.comm.mappings import (
    differentiable_all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from mpu.comm.transport import Axis, Label, Splits
from mpu.context import ExpertOptions
from mpu.layers.experts import Counts


class Exchange(NamedTuple):
    """An all-to-all of rows, and how its result is put in the order of (expert, rank, token).

    order: of the rows that came, the one at each place [n]; place: where each goes [n].
    """

    splits: Splits
    order: Tensor
    place: Tensor


class Plan(NamedTuple):
    """Which row is whose.

    choice: the experts of each of this rank's tokens [T, k]. counts: rows of each expert of this
    rank. flat: the pair, token x k + j, of each row; of the rows to be sent, where there is an
    exchange. place: the row of each pair [T, k], where there is none a number past the last row.
    AllGather: flat and place count the tokens of all ranks of ep.
    """

    choice: Tensor
    counts: Counts
    flat: Tensor
    place: Tensor
    exchange: Exchange | None = None


def even(total: int, parts: int) -> list[int]:
    """Return `total` in parts that differ by one at most, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def spread(total: int, experts: int, ranks: int, skew: float) -> list[int]:
    """Return the pairs of each expert where no values say it: as many for each; with skew the
    experts of the first rank have together skew times the mean of a rank, and so the most.
    """
    if skew == 1.0 or ranks == 1:
        return even(total, experts)
    first, own = min(total, round(total * skew / ranks)), experts // ranks
    return even(first, own) + even(total - first, experts - own)


def sort_pairs(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stable order of keys [n], and the place of each in it."""
    order = torch.argsort(keys, stable=True)
    return order, torch.empty_like(order).scatter_(0, order, _numbers(order))


def _numbers(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), device=like.device)


class Dispatcher:
    """What brings tokens to the experts of a rank that holds them all.

    experts: their number on all ranks. who: the layer, for the trace of the axis.
    """

    def __init__(self, experts: int, ep: Axis, who: object, skew: float = 1.0) -> None:
        self.experts, self.ep, self.who, self.skew = experts, ep, who, skew
        self.local = experts // ep.size
        self.label = Label(who, "forward")

    def plan(self, choice: Tensor) -> Plan:
        """Return the plan for the experts chosen: choice [T, k], of different experts a token."""
        found = self.count(choice)
        counts = self.on_host(found[None], choice.numel())[0]
        order, place = sort_pairs(choice.flatten())
        return Plan(choice, Counts.of(counts, found), order, place.view_as(choice))

    def rows(self, x: Tensor, plan: Plan) -> Tensor:
        """x [T, h] -> the rows of this rank's experts [n, h]."""
        y: Tensor = _Rows.apply(x, plan.flat, plan.place)
        return y

    def combine(self, rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        """rows [n, h], weights [T, k] in the accumulation dtype -> y [T, h] in the rows' dtype."""
        y: Tensor = _Combine.apply(rows, weights, plan.flat, plan.place)
        return y

    def count(self, choice: Tensor) -> Tensor:
        """Return the pairs of each expert [E]."""
        pairs = choice.flatten().long()  # bincount would wait for a device, to see the largest
        found = torch.zeros((self.experts,), dtype=torch.long, device=choice.device)
        return found.index_add_(0, pairs, torch.ones_like(pairs))

    def on_host(self, counts: Tensor, total: int) -> list[list[int]]:
        """Return counts [ranks, E] on the host: the one wait for the device of a layer.

        On meta tensors each rank's `total` pairs are as `assumed`.
        """
        if counts.is_meta:
            return [self.assumed(total)] * len(counts)
        found: list[list[int]] = counts.tolist()
        return found

    def assumed(self, total: int) -> list[int]:
        """Return what pairs each expert gets of `total` whose experts no values tell."""
        return spread(total, self.experts, self.ep.size, self.skew)


class AllGather(Dispatcher):
    """Every rank gets every token: 4 T h (ep - 1) numbers a layer, whatever k, in equal parts."""

    def plan(self, choice: Tensor) -> Plan:
        """Gather the choices of all ranks of ep; plan the rows of this rank's experts."""
        every = all_gather(choice.int(), self.ep, label=self.label)[0].long()
        first, found = self.ep.rank * self.local, self.count(every)
        own = slice(first, first + self.local)
        counts = Counts.of(self.on_host(found[None], every.numel())[0][own], found[own])
        keys = every.flatten() - first
        foreign = (keys < 0) | (keys >= self.local)
        order, place = sort_pairs(torch.where(foreign, self.local, keys))
        return Plan(choice, counts, order[: sum(counts.each)], place.view_as(every))

    def rows(self, x: Tensor, plan: Plan) -> Tensor:
        """x [T, h] -> the rows of this rank's experts, from all ranks of ep [n, h]."""
        return super().rows(gather_from_sequence_parallel_region(x, self.ep, self.who), plan)

    def combine(self, rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        """Combine the rows that are here, for all ranks; sum what the ranks have, in rank order."""
        every = gather_from_sequence_parallel_region(weights, self.ep, self.who)
        partial = super().combine(rows, every, plan)
        return reduce_scatter_to_sequence_parallel_region(partial, self.ep, self.who)


class AllToAll(Dispatcher):
    """Every token goes to its experts' ranks: 4 k T h (ep - 1) / ep numbers a layer at balance."""

    def plan(self, choice: Tensor) -> Plan:
        """Exchange the counts, which say how many rows come from each rank for each expert."""
        ep, first = self.ep, self.ep.rank * self.local
        every = all_gather(self.count(choice)[None].int(), ep, label=self.label)[0]  # [ep, E]
        counts = self.on_host(every, choice.numel())
        mine = [row[first : first + self.local] for row in counts]  # [ep, E/ep]
        there = (counts[ep.rank][r * self.local : (r + 1) * self.local] for r in range(ep.size))
        splits = Splits(tuple(map(sum, there)), tuple(map(sum, mine)))
        came = every[:, first : first + self.local]  # [ep, E/ep]
        experts = torch.arange(self.local, device=choice.device).repeat(ep.size)
        keys = torch.repeat_interleave(experts, came.flatten(), output_size=sum(splits.output))
        back = Exchange(splits, *sort_pairs(keys))
        flat, place = sort_pairs(choice.flatten())
        rows = Counts.of([*map(sum, zip(*mine, strict=True))], came.sum(0))
        return Plan(choice, rows, flat, place.view_as(choice), back)

    def rows(self, x: Tensor, plan: Plan) -> Tensor:
        """x [T, h] -> the rows of this rank's experts, from all ranks of ep [n, h]."""
        assert plan.exchange is not None
        splits, order, place = plan.exchange
        came = differentiable_all_to_all(super().rows(x, plan), self.ep, splits, self.who)
        y: Tensor = _Rows.apply(came, order, place[:, None])
        return y

    def combine(self, rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        """Send each row back to its token's rank; combine them there."""
        assert plan.exchange is not None
        splits, order, place = plan.exchange
        back = _Rows.apply(rows, place, order[:, None])
        own = differentiable_all_to_all(back, self.ep, splits.reversed, self.who)
        return super().combine(own, weights, plan)


DISPATCHERS: dict[str, type[Dispatcher]] = {"allgather": AllGather, "alltoall": AllToAll}


def dispatcher(
    options: ExpertOptions, experts: int, topk: int, ep: Axis, who: object
) -> Dispatcher:
    """Return the dispatcher that the options name, "auto" the one that sends fewer bytes at
    balance.

    An all-gather sends (ep - 1) T h numbers each way, an all-to-all k / ep of that.
    """
    if ep.size == 1:
        return Dispatcher(experts, ep, who)
    kind = options.dispatcher
    if kind == "auto":
        kind = "allgather" if ep.size <= topk else "alltoall"
    return DISPATCHERS[kind](experts, ep, who, options.skew)


class _Rows(torch.autograd.Function):
    """x [T, h] -> the row of each pair [n, h]; a token's gradients are added in the order of j."""

    @staticmethod
    def forward(saved_ctx: Any, x: Tensor, flat: Tensor, place: Tensor) -> Tensor:
        saved_ctx.save_for_backward(place)
        return x.index_select(0, _token(flat, place.shape[1]))

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (place,) = saved_ctx.saved_tensors
        return _sum(dy, place), None, None


class _Combine(torch.autograd.Function):
    """rows [n, h], weights [T, k] -> y [T, h]."""

    @staticmethod
    def forward(
        saved_ctx: Any, rows: Tensor, weights: Tensor, flat: Tensor, place: Tensor
    ) -> Tensor:
        saved_ctx.save_for_backward(rows, weights, flat, place)
        return _sum(rows, place, weights)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, flat, place = saved_ctx.saved_tensors
        own = weights.flatten().index_select(0, flat)[:, None]  # [n, 1]
        drows = dy.index_select(0, _token(flat, place.shape[1])).to(own.dtype).mul_(own)
        wide = dy.to(own.dtype)
        dots = [(wide * part).sum(1) for part in _parts(rows, place, own.dtype)]
        return drows.to(rows.dtype), torch.stack(dots, 1), None, None


def _token(flat: Tensor, k: int) -> Tensor:
    return flat if k == 1 else torch.div(flat, k, rounding_mode="floor")


def _parts(rows: Tensor, place: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the rows of each token's first pair, second pair, ... [T, h]; zeros where elsewhere."""
    n = len(rows)
    for at in place.unbind(1):
        if n == place.numel():
            yield rows.index_select(0, at).to(dtype)
        elif n:
            here = rows.index_select(0, at.clamp(max=n - 1)).to(dtype)
            yield torch.where((at < n)[:, None], here, 0.0)
        else:
            yield torch.zeros((len(at), *rows.shape[1:]), dtype=dtype, device=rows.device)


def _sum(rows: Tensor, place: Tensor, weights: Tensor | None = None) -> Tensor:
    """Add each token's rows, times its weights if any, in the order of j: [n, h] -> [T, h]."""
    kind = torch.promote_types(rows.dtype, torch.float32) if weights is None else weights.dtype
    if place.shape[1] == 1 and weights is None and len(rows) == len(place):
        return rows.index_select(0, place[:, 0])
    total = None
    for j, part in enumerate(_parts(rows, place, kind)):
        part = part if weights is None else part * weights[:, j, None]
        total = part if total is None else total + part
    assert total is not None
    return total.to(rows.dtype)
