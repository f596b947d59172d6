# SPDX-License-Identifier: Apache-2.0
"""Dispatch tokens to their experts, and combine the experts' outputs.

    T tokens of this rank, k experts per token, E experts, n rows: pairs of a token and an expert of
    this rank, in the order of (expert, token)

    Dispatcher.plan     choice [T, k] -> a Plan: the token and expert of each row, computed once
    Dispatcher.rows     x [T, h] -> [n, h]
    Dispatcher.combine  [n, h], weights [T, k] -> y [T, h], y_t = sum over j of weights_tj row_tj

    Dispatcher          ep 1: no communication
    AllGather           every rank gets the tokens of all ranks of ep, takes the rows of its
                        experts, and the partial y are summed in rank order
    AllToAll            every token is sent only to the ranks of its experts, and back

Rows are sorted stably, and a token's outputs are added in the order of j, in the accumulation
dtype. Nothing is added by scatter, so the bits do not depend on the order of the device's threads.
Gradients take the reverse path: the gradient of a gather is a sum in rank order, that of an
exchange is the reversed exchange. Work between `start` and `finish` overlaps the exchange of rows,
and in backward so do the weight gradients of the experts' first matmul. Before it waits, AllToAll
switches to the other micro-batch (mpu/interleave.py), if two run interleaved. The host needs the
sizes of the messages, and of the experts' products: one wait for the device per layer, and none if
experts are padded to a capacity.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpu.comm.collectives import all_gather, all_to_all
from mpu.comm.mappings import (
    differentiable_all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from mpu.comm.transport import Axis, Handle, Label, Splits
from mpu.context import ExpertOptions
from mpu.host_memory import read_values
from mpu.interleave import Interleaver
from mpu.kernels import available
from mpu.layers.experts import Counts, Later
from mpu.layers.fused_gpu import DTYPES


class Exchange(NamedTuple):
    """An all-to-all of rows, and the permutation of its result to the order (expert, rank, token).

    order: the index of the received row at each place [n]; place: its inverse, the place of each
    received row [n].
    """

    splits: Splits
    order: Tensor
    place: Tensor


class Plan(NamedTuple):
    """The mapping between rows and pairs of a token and an expert.

    A pair is a token and one of its experts, with index token x k + j. With AllGather, `flat` and
    `place` cover the tokens of all ranks of ep.
    """

    choice: Tensor  # the experts of each of this rank's tokens [T, k]
    counts: Counts  # rows of each expert of this rank
    flat: Tensor  # the pair of each row; with an exchange, of the rows to be sent
    place: Tensor  # the row of each pair [T, k]; an index past the last row if it has none
    exchange: Exchange | None = None
    # some rows belong to no pair: they are zero, with an index in `flat` past the last pair
    padded: bool = False


class Capacity(NamedTuple):
    """The capacity of experts: how many of a rank's pairs each expert accepts, and which.

    size: the maximum C per expert. slot: the slot of each pair [T, k], expert x C + its rank among
    the expert's pairs; E x C if the expert was full. padded: every expert has C rows, with zeros in
    empty slots, so that all sizes are known without reading values.
    """

    size: int
    slot: Tensor
    padded: bool

    @classmethod
    def of(
        cls, choice: Tensor, load: Tensor, factor: float, weights: Tensor, padded: bool
    ) -> "Capacity":
        """Return the capacity for the chosen experts [T, k]; load [E] counts the pairs of each.

        C = ceil(T k / E x factor) as in Megatron-LM, at most T. An expert accepts the pairs with
        the highest weights [T, k], and the earlier one of two with equal weights.
        """
        (t, k), e = choice.shape, len(load)
        size = min(t, math.ceil(t * k / e * factor))
        flat = choice.flatten()
        best = torch.argsort(weights.flatten(), descending=True, stable=True)
        order = best[torch.argsort(flat[best], stable=True)]
        begins = load.cumsum(0) - load
        rank = _numbers(flat) - begins.index_select(0, flat[order])
        rank = torch.empty_like(rank).scatter_(0, order, rank)
        slot = torch.where(rank < size, flat * size + rank, e * size)
        return cls(size, slot.view_as(choice), padded)

    def mark_dropped(self, choice: Tensor, experts: int) -> Tensor:
        """Return the choice [T, k], with dropped pairs replaced by the index `experts`."""
        return torch.where(self.slot < experts * self.size, choice, experts)


def even(total: int, parts: int) -> list[int]:
    """Split `total` into parts that differ by at most one, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def spread(total: int, experts: int, ranks: int, skew: float) -> list[int]:
    """Return the assumed number of pairs of each expert, without data: equal for all experts; with
    skew the experts of the first rank together have skew times a rank's mean, and so the most.
    """
    if skew == 1.0 or ranks == 1:
        return even(total, experts)
    first, own = min(total, round(total * skew / ranks)), experts // ranks
    return even(first, own) + even(total - first, experts - own)


def sort_pairs(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stable sorting order of keys [n] and its inverse."""
    order = torch.argsort(keys, stable=True)
    return order, torch.empty_like(order).scatter_(0, order, _numbers(order))


def count_of(numbers: Tensor, most: int) -> Tensor:
    """Return how often each integer from 0 to most - 1 occurs in `numbers`: [most], int64.

    Integer sums are exact in any order, and nothing waits for the device.
    """
    found = torch.zeros(most, dtype=torch.long, device=numbers.device)
    return found.index_add_(0, numbers.flatten(), torch.ones_like(numbers).flatten())


def _numbers(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), device=like.device)


@dataclass
class Sent:
    """Rows in flight to their experts, and in backward their gradients in flight back.

    handle: of the exchange in flight. later: work that backward runs meanwhile; None if there is no
    communication between `start` and `finish`.
    """

    rows: Tensor | None
    handle: Handle | None = None
    later: Later | None = None

    def take(self) -> Tensor:
        """Return the rows and drop the reference, as their graph holds this object."""
        rows, self.rows = self.rows, None
        assert rows is not None, "take() was called before"
        return rows


class Dispatcher:
    """The dispatcher of a rank that holds all experts; base class of the others.

    experts: their number on all ranks. who: the layer, for the trace of the axis. interleaver: runs
    two micro-batches, one of which computes while the other's rows are in flight.
    """

    def __init__(
        self, experts: int, ep: Axis, who: object, interleaver: Interleaver, skew: float = 1.0
    ) -> None:
        self.experts, self.ep, self.who, self.skew = experts, ep, who, skew
        self.interleaver = interleaver
        self.local = experts // ep.size
        self.label = Label(who, "forward")

    def plan(self, choice: Tensor, load: Tensor, capacity: Capacity | None = None) -> Plan:
        """Return the plan for the chosen experts: choice [T, k], the experts of a token distinct.

        load: how often each expert is chosen [E]. capacity: limits the pairs of each expert; None:
        no limit.
        """
        if capacity is not None and capacity.padded:
            counts = _equal(capacity.size, self.experts, choice)
            flat = _pairs_of(capacity.slot, sum(counts.each))
            return Plan(choice, counts, flat, capacity.slot, padded=True)
        found = self.on_host(load[None], choice.numel(), capacity)[0]
        counts = Counts.of(found, not_dropped(load, capacity))
        flat, place = self.sort(choice, capacity)
        return Plan(choice, counts, flat[: sum(counts.each)], place)

    def sort(self, choice: Tensor, capacity: Capacity | None) -> tuple[Tensor, Tensor]:
        """Return the pairs in the order of (expert, token), dropped ones last, and the row of each
        pair [T, k].
        """
        keys = choice if capacity is None else capacity.mark_dropped(choice, self.experts)
        order, place = sort_pairs(keys.flatten())
        return order, place.view_as(choice)

    def rows(self, x: Tensor, plan: Plan) -> Tensor:
        """x [T, h] -> the rows of this rank's experts [n, h]."""
        y: Tensor = _Rows.apply(x, plan.flat, plan.place, plan.padded, self.by_kernels(x))
        return y

    def by_kernels(self, x: Tensor) -> bool:
        """Return whether Triton kernels sum and weight rows like x (mpu/kernels/expert_rows.py).

        For meta tensors, which represent a GPU's, nothing is launched.
        """
        return self.ep.on_gpu(x) and x.dtype in DTYPES and (x.is_meta or not available.why_not())

    def start(self, x: Tensor, plan: Plan) -> Sent:
        """Begin `rows`: work between this call and `finish` overlaps the exchange of rows."""
        return Sent(self.rows(x, plan))

    def finish(self, sent: Sent, plan: Plan) -> Tensor:
        """Return the rows of this rank's experts [n, h]."""
        return sent.take()

    def combine(self, rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        """rows [n, h], weights [T, k] in the accumulation dtype -> y [T, h] in the rows' dtype."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        kernels = self.by_kernels(rows) and weights.dtype == wide
        y: Tensor = _Combine.apply(rows, weights, plan.flat, plan.place, plan.padded, kernels)
        return y

    def on_host(self, load: Tensor, total: int, capacity: Capacity | None) -> list[list[int]]:
        """Return, on the host, the number of pairs of each expert that are not dropped, given load
        [ranks, E]. This is the only wait for the device in a layer.

        For meta tensors each rank's `total` pairs are distributed as in `assumed`.
        """
        if load.is_meta:
            most = total if capacity is None else capacity.size
            return [[min(n, most) for n in self.assumed(total)]] * len(load)
        found: list[list[int]] = read_values(not_dropped(load, capacity))
        return found

    def assumed(self, total: int) -> list[int]:
        """Return the assumed number of pairs of each expert, of `total` pairs without data."""
        return spread(total, self.experts, self.ep.size, self.skew)


class AllGather(Dispatcher):
    """Every rank gets every token: 4 T h (ep - 1) elements per layer for any k, in equal parts."""

    def plan(self, choice: Tensor, load: Tensor, capacity: Capacity | None = None) -> Plan:
        """Gather the choices of all ranks of ep; plan the rows of this rank's experts."""
        first = self.ep.rank * self.local
        if capacity is not None and capacity.padded:
            return self._padded(choice, capacity)
        keys = choice if capacity is None else capacity.mark_dropped(choice, self.experts)
        every = all_gather(keys.int(), self.ep, label=self.label)[0].long()
        # each rank drops its own pairs, so an expert may get more than one rank's capacity
        found, own = count_of(every, self.experts + 1)[:-1], slice(first, first + self.local)
        counts = Counts.of(self.on_host(found[None], every.numel(), None)[0][own], found[own])
        keys = every.flatten() - first
        foreign = (keys < 0) | (keys >= self.local)
        order, place = sort_pairs(torch.where(foreign, self.local, keys))
        return Plan(choice, counts, order[: sum(counts.each)], place.view_as(every))

    def _padded(self, choice: Tensor, capacity: Capacity) -> Plan:
        """Plan rows in the order of (expert, rank, slot); all sizes are known in advance."""
        ep, size, first = self.ep, capacity.size, self.ep.rank * self.local
        every = all_gather(capacity.slot.int()[None], ep, label=self.label)[0].long()  # [ep, T, k]
        expert, rank = every // size - first, _numbers(every[:, 0, 0])[:, None, None]
        counts = _equal(ep.size * size, self.local, choice)
        rows = sum(counts.each)
        place = (expert * ep.size + rank) * size + every % size
        here = (expert >= 0) & (expert < self.local)
        place = torch.where(here, place, rows).flatten(0, 1)
        return Plan(choice, counts, _pairs_of(place, rows), place, padded=True)

    def rows(self, x: Tensor, plan: Plan) -> Tensor:
        """x [T, h] -> the rows of this rank's experts, from all ranks of ep [n, h]."""
        return super().rows(gather_from_sequence_parallel_region(x, self.ep, self.who), plan)

    def combine(self, rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        """Combine this rank's rows for the tokens of all ranks; sum the ranks' partial results, in
        rank order.
        """
        every = gather_from_sequence_parallel_region(weights, self.ep, self.who)
        partial = super().combine(rows, every, plan)
        return reduce_scatter_to_sequence_parallel_region(partial, self.ep, self.who)


class AllToAll(Dispatcher):
    """Send tokens to their experts' ranks: 4 k T h (ep - 1) / ep elements per layer if balanced."""

    def plan(self, choice: Tensor, load: Tensor, capacity: Capacity | None = None) -> Plan:
        """Exchange the counts: how many rows each rank sends for each expert."""
        if capacity is not None and capacity.padded:
            return self._padded(choice, load, capacity)
        ep, first = self.ep, self.ep.rank * self.local
        every = all_gather(load[None].int(), ep, label=self.label)[0]  # [ep, E]
        every = not_dropped(every, capacity)
        counts = self.on_host(every, choice.numel(), capacity)
        mine = [row[first : first + self.local] for row in counts]  # [ep, E/ep]
        there = (counts[ep.rank][r * self.local : (r + 1) * self.local] for r in range(ep.size))
        splits = Splits(tuple(map(sum, there)), tuple(map(sum, mine)))
        came = every[:, first : first + self.local]  # [ep, E/ep]
        experts = torch.arange(self.local, device=choice.device).repeat(ep.size)
        keys = torch.repeat_interleave(experts, came.flatten(), output_size=sum(splits.output))
        back = Exchange(splits, *sort_pairs(keys))
        flat, place = self.sort(choice, capacity)
        rows = Counts.of([*map(sum, zip(*mine, strict=True))], came.sum(0))
        return Plan(choice, rows, flat[: sum(splits.input)], place, back)

    def _padded(self, choice: Tensor, load: Tensor, capacity: Capacity) -> Plan:
        """Plan an exchange of equally many rows for each expert, without communicating counts."""
        ranks, size, plan = self.ep.size, capacity.size, super().plan(choice, load, capacity)
        splits = Splits((self.local * size,) * ranks, (self.local * size,) * ranks)
        came = torch.arange(ranks * self.local * size, device=choice.device)
        order = came.view(ranks, self.local, size).transpose(0, 1).flatten()
        place = came.view(self.local, ranks, size).transpose(0, 1).flatten()
        counts = _equal(ranks * size, self.local, choice)
        return plan._replace(counts=counts, exchange=Exchange(splits, order, place))

    def rows(self, x: Tensor, plan: Plan) -> Tensor:
        """x [T, h] -> the rows of this rank's experts, from all ranks of ep [n, h]."""
        return self.finish(self.start(x, plan), plan)

    def start(self, x: Tensor, plan: Plan) -> Sent:
        """Start sending each row to its expert's rank."""
        assert plan.exchange is not None
        sent = Sent(None, later=[])
        sent.rows = _Start.apply(super().rows(x, plan), self, plan.exchange.splits, sent)
        return sent

    def finish(self, sent: Sent, plan: Plan) -> Tensor:
        """Wait for the rows; sort them by expert."""
        assert plan.exchange is not None
        splits, order, place = plan.exchange
        came = _Finish.apply(sent.take(), self, splits, sent)
        y: Tensor = _Rows.apply(came, order, place[:, None], False, False)
        return y

    def combine(self, rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        """Send each row back to its token's rank; combine the rows there."""
        assert plan.exchange is not None
        splits, order, place = plan.exchange
        back = _Rows.apply(rows, place, order[:, None], False, False)
        own = differentiable_all_to_all(back, self.ep, splits.reversed, self.who, self.interleaver)
        return super().combine(own, weights, plan)


DISPATCHERS: dict[str, type[Dispatcher]] = {"allgather": AllGather, "alltoall": AllToAll}


def dispatcher(
    options: ExpertOptions, experts: int, topk: int, ep: Axis, who: object, interleaver: Interleaver
) -> Dispatcher:
    """Return the dispatcher that the options name; "auto": the one that sends fewer bytes if the
    load is balanced.

    An all-gather sends (ep - 1) T h elements each way, an all-to-all k / ep of that.
    """
    kind = dispatcher_of(options, topk, ep.size)
    return kind(experts, ep, who, interleaver, options.skew)


def dispatcher_of(options: ExpertOptions, topk: int, ranks: int) -> type[Dispatcher]:
    """Return the dispatcher class for a number of ranks of ep: see `dispatcher`."""
    if ranks == 1:
        return Dispatcher
    kind = options.dispatcher
    if kind == "auto":
        kind = "allgather" if ranks <= topk else "alltoall"
    return DISPATCHERS[kind]


class _Start(torch.autograd.Function):
    """Start to exchange rows; in backward wait for their gradients.

    Between _Start and _Finish the result is not available yet, and no operation may use it. In
    backward autograd runs the work between the two forwards between the two backwards.
    """

    @staticmethod
    def forward(
        saved_ctx: Any, x: Tensor, dispatcher: Dispatcher, splits: Splits, sent: Sent
    ) -> Tensor:
        saved_ctx.sent, saved_ctx.interleaver = sent, dispatcher.interleaver
        label = dispatcher.label
        y, sent.handle = all_to_all(x, dispatcher.ep, async_op=True, splits=splits, label=label)
        return y

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        saved_ctx.interleaver.switch()
        _wait(saved_ctx.sent)  # for the gradients of x, whose number differs from that of y's
        return saved_ctx.sent.take(), None, None, None


class _Finish(torch.autograd.Function):
    """Wait for the rows; in backward start to send their gradients back, and meanwhile run the
    deferred work: the experts' weight gradients.
    """

    @staticmethod
    def forward(
        saved_ctx: Any, y: Tensor, dispatcher: Dispatcher, splits: Splits, sent: Sent
    ) -> Tensor:
        saved_ctx.dispatcher, saved_ctx.splits, saved_ctx.sent = dispatcher, splits, sent
        dispatcher.interleaver.switch()
        _wait(sent)
        return y.view_as(y)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        sent, dispatcher = saved_ctx.sent, saved_ctx.dispatcher
        splits, label = saved_ctx.splits.reversed, Label(dispatcher.who, "backward")
        exchange = all_to_all(dy, dispatcher.ep, async_op=True, splits=splits, label=label)
        sent.rows, sent.handle = exchange
        while sent.later:
            sent.later.pop(0)()
        return dy, None, None, None  # _Start takes `rows` instead


def _wait(sent: Sent) -> None:
    assert sent.handle is not None, "no exchange is in flight"
    sent.handle.wait()
    sent.handle = None


class _Rows(torch.autograd.Function):
    """x [T, h] -> the row of each pair [n, h]; a token's gradients are added in the order of j."""

    @staticmethod
    def forward(
        saved_ctx: Any, x: Tensor, flat: Tensor, place: Tensor, padded: bool, kernels: bool
    ) -> Tensor:
        saved_ctx.save_for_backward(place)
        saved_ctx.padded, saved_ctx.kernels = padded, kernels
        if not padded:
            return x.index_select(0, _token(flat, place.shape[1]))
        full = flat < place.numel()
        some = x.index_select(0, _token(flat.clamp(max=place.numel() - 1), place.shape[1]))
        return torch.where(full[:, None], some, 0.0)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (place,) = saved_ctx.saved_tensors
        dx = _sum(dy, place, None, saved_ctx.padded, saved_ctx.kernels)
        return dx, None, None, None, None


class _Combine(torch.autograd.Function):
    """rows [n, h], weights [T, k] -> y [T, h]."""

    @staticmethod
    def forward(
        saved_ctx: Any, rows: Tensor, weights: Tensor, flat: Tensor, place: Tensor, padded: bool,
        kernels: bool,
    ) -> Tensor:  # fmt: skip
        saved_ctx.save_for_backward(rows, weights, flat, place)
        saved_ctx.padded, saved_ctx.kernels = padded, kernels
        return _sum(rows, place, weights, padded, kernels)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        rows, weights, flat, place = saved_ctx.saved_tensors
        if saved_ctx.kernels:
            both = _gradients_by_kernel(rows, weights, place, dy, saved_ctx.padded)
        else:
            both = _gradients(rows, weights, flat, place, dy, saved_ctx.padded)
        return *both, None, None, None, None


def not_dropped(load: Tensor, capacity: Capacity | None) -> Tensor:
    """Return how many of the pairs counted in `load` are not dropped, for each expert."""
    return load if capacity is None else load.clamp(max=capacity.size)


def _equal(rows: int, experts: int, like: Tensor) -> Counts:
    """Return Counts of `rows` rows for each of `experts` experts, on the device of `like`."""
    return Counts.of((rows,) * experts, torch.full((experts,), rows, device=like.device))


def _pairs_of(place: Tensor, rows: int) -> Tensor:
    """Return the pair of each row [rows], given the row of each pair: place [T, k]. For a row
    without a pair, it is an index past the last pair.
    """
    flat = torch.full((rows + 1,), place.numel(), device=place.device)
    return flat.scatter_(0, place.flatten(), _numbers(place))[:-1]


def _token(flat: Tensor, k: int) -> Tensor:
    return flat if k == 1 else torch.div(flat, k, rounding_mode="floor")


def _parts(
    rows: Tensor, place: Tensor, dtype: torch.dtype, padded: bool = False
) -> Iterator[Tensor]:
    """Yield the rows of each token's first pair, second pair, ... [T, h]; zeros if not here."""
    n = len(rows)
    for at in place.unbind(1):
        if n == place.numel() and not padded:  # every pair has a row
            yield rows.index_select(0, at).to(dtype)
        elif n:
            here = rows.index_select(0, at.clamp(max=n - 1)).to(dtype)
            yield torch.where((at < n)[:, None], here, 0.0)
        else:
            yield torch.zeros((len(at), *rows.shape[1:]), dtype=dtype, device=rows.device)


def _sum(
    rows: Tensor, place: Tensor, weights: Tensor | None = None, padded: bool = False,
    kernels: bool = False,
) -> Tensor:  # fmt: skip
    """Add each token's rows, times its weights if any, in the order of j: [n, h] -> [T, h]."""
    kind = torch.promote_types(rows.dtype, torch.float32) if weights is None else weights.dtype
    if place.shape[1] == 1 and weights is None and len(rows) == len(place) and not padded:
        return rows.index_select(0, place[:, 0])
    if kernels:
        out = rows.new_empty((len(place), *rows.shape[1:]))
        if not out.is_meta:
            from mpu.kernels import expert_rows

            given = None if weights is None else weights.contiguous()
            expert_rows.sum_rows(rows.contiguous(), place.contiguous(), given, out)
        return out
    total = None
    for j, part in enumerate(_parts(rows, place, kind, padded)):
        part = part if weights is None else part * weights[:, j, None]
        total = part if total is None else total + part
    assert total is not None
    return total.to(rows.dtype)


def _gradients(
    rows: Tensor, weights: Tensor, flat: Tensor, place: Tensor, dy: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows [n, h] and weights [T, k], given dy [T, h] of their sums."""
    if padded:  # an empty row has no token: its weight is zero
        weights = torch.cat([weights.flatten(), weights.new_zeros(1)])
    own = weights.flatten().index_select(0, flat)[:, None]  # [n, 1]
    token = _token(flat, place.shape[1])
    token = token.clamp(max=len(dy) - 1) if padded else token
    drows = dy.index_select(0, token).to(own.dtype).mul_(own)
    wide = dy.to(own.dtype)
    dots = [(wide * part).sum(1) for part in _parts(rows, place, own.dtype, padded)]
    return drows.to(rows.dtype), torch.stack(dots, 1)


def _gradients_by_kernel(
    rows: Tensor, weights: Tensor, place: Tensor, dy: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    """Compute `_gradients` in one kernel launch."""
    drows = torch.zeros_like(rows) if padded else torch.empty_like(rows)  # some have no pair
    dweights = torch.empty_like(weights)
    if not drows.is_meta:
        from mpu.kernels import expert_rows

        rows, place, weights, dy = (x.contiguous() for x in (rows, place, weights, dy))
        expert_rows.combine_backward(rows, place, weights, dy, drows, dweights)
    return drows, dweights
