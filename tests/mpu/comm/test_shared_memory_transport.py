# SPDX-License-Identifier: Apache-2.0
"""Collectives through shared memory give the same bits as through gloo, whatever the ranks' pace.

Shapes change from epoch to epoch, slots are poisoned before they are written, ranks sleep before
they publish and before they read, and each waits for handles in an order of its own.
"""

import copy
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from mpu.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_in_order,
    all_to_all,
    by_process_group,
    group_of,
    reduce_scatter,
)
from mpu.comm.shared_memory import SharedMemoryTransport
from mpu.comm.symmetric import SymmetricBuffer
from mpu.comm.transport import Axis, Handle, Splits
from mpu.comm.workspace import Workspace
from mpu.connect import share
from tests.sampling import sampled

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
VERBS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "uneven all_to_all")
WAIT = timedelta(seconds=20)


@dataclass
class Call:
    """One collective, the same on all ranks but for the numbers, which hang on seed and rank."""

    verb: str
    rows: int  # of a rank's part
    width: int
    dtype: torch.dtype
    into: bool
    async_op: bool
    seed: int

    @classmethod
    def drawn(cls, draw: random.Random, seed: int, growth: bool) -> "Call":
        verb = draw.choice(VERBS)
        rows, width = draw.choice([0, 1, 3, 8, 17]), draw.choice([1, 2, 7, 33])
        rows = rows or int(verb == "all_reduce")
        if growth and draw.random() < 0.03:
            rows, width = draw.randrange(300, 900), 257
        dtype = draw.choice(DTYPES)
        return cls(verb, rows, width, dtype, draw.random() < 0.3, draw.random() < 0.7, seed)

    def issue(self, axis: Axis) -> tuple[Tensor, Handle]:
        """Return the result and what to wait for."""
        n, t, async_op = self.rows, axis.size, self.async_op
        x = self.part(axis.ranks[axis.rank], n if self.verb == "all_gather" else n * t)
        if self.verb == "all_reduce":
            return all_reduce(x[:-1], axis, async_op)  # does not divide by t
        if self.verb == "all_gather":
            into = x.new_empty((n * t, self.width)) if self.into else None
            if into is not None:
                into[axis.rank * n : (axis.rank + 1) * n] = x
                x = into[axis.rank * n : (axis.rank + 1) * n]
            return all_gather(x, axis, async_op, into)
        if self.verb == "all_to_all":
            return all_to_all(x, axis, async_op)
        if self.verb == "uneven all_to_all":
            table = torch.randint(n + 2, (t, t), generator=torch.Generator().manual_seed(self.seed))
            splits = Splits(tuple(table[axis.rank].tolist()), tuple(table[:, axis.rank].tolist()))
            x = self.part(axis.ranks[axis.rank], sum(splits.input))
            return all_to_all(x, axis, async_op, splits)
        into = x[axis.rank * n : (axis.rank + 1) * n] if self.into else None
        if into is not None and self.dtype == torch.bfloat16:
            into = torch.empty(into.shape)  # wider than what travels
        return reduce_scatter(x, axis, async_op, into)

    def expected(self, axis: Axis) -> Tensor:
        """Return what gloo makes of it."""
        gloo = by_process_group(axis)
        if self.verb == "all_reduce":
            x = self.part(axis.ranks[axis.rank], self.rows * axis.size)
            return all_reduce_in_order(x[:-1], gloo)
        return replace(self, async_op=False).issue(gloo)[0]

    def part(self, rank: int, rows: int) -> Tensor:
        numbers = torch.Generator().manual_seed(1000 * self.seed + rank)
        x = torch.randn(rows, self.width, generator=numbers)
        return (100 * x).to(self.dtype) if self.dtype == torch.int64 else x.to(self.dtype)


@contextmanager
def hostile(rank: int, pace: float) -> Iterator[random.Random]:
    """Poison each turn's own part (all bits set: NaN, or -1), and dawdle before every signal and
    after every wait, `pace` seconds now and then.
    """
    whim = random.Random(rank)
    begin, signal_all = Workspace.begin, SymmetricBuffer.signal_all
    wait_all = SymmetricBuffer.wait_all

    def dawdle() -> None:
        if whim.random() < 0.3:
            time.sleep(whim.random() * pace)

    def begun(space: Workspace, part_bytes: int) -> Any:
        turn = begin(space, part_bytes)
        turn.part(space.axis.rank, (part_bytes,), torch.uint8).fill_(255)
        return turn

    def signalled(buffer: SymmetricBuffer, epoch: int) -> None:
        dawdle()
        signal_all(buffer, epoch)

    def waited(buffer: SymmetricBuffer, epoch: int, what: str) -> None:
        wait_all(buffer, epoch, what)
        dawdle()

    Workspace.begin, SymmetricBuffer.signal_all = begun, signalled
    SymmetricBuffer.wait_all = waited
    try:
        yield whim
    finally:
        Workspace.begin, SymmetricBuffer.signal_all = begin, signal_all
        SymmetricBuffer.wait_all = wait_all


def run_at_random(comm, axes: list[Axis], epochs: int, seed: int, growth: bool = True) -> list[int]:
    """Run so many collectives over the axes by turns, hold the results against gloo's; return the
    epochs that the axes' workspaces have then seen.
    """
    draw, results, waiting = random.Random(seed), [], []
    with hostile(comm.rank, 1e-3) as whim:
        for i in range(epochs):
            axis, call = draw.choice(axes), Call.drawn(draw, seed * epochs + i, growth)
            out, handle = call.issue(axis)
            results.append((axis, call, out))
            waiting.append(handle)
            whim.shuffle(waiting)  # every rank in its own order
            while waiting and (len(waiting) > 5 or whim.random() < 0.4):
                waiting.pop().wait()
        for handle in waiting:
            handle.wait()
    for axis, call, out in results:
        expected = call.expected(axis)
        assert out.dtype == expected.dtype and torch.equal(out, expected), (axis.name, call)
    return [axis.transport.workspace.epoch for axis in axes]


def own(comm, axis: Axis) -> Axis:
    """Return the axis with a workspace of its own, which is small."""
    return replace(axis, transport=SharedMemoryTransport(group_of(axis), Workspace(axis, WAIT)))


def one_axis(comm, epochs: int) -> None:
    axis = own(comm, comm.grid().dp_cp)
    [seen] = run_at_random(comm, [axis], epochs, 1)
    assert seen >= epochs and axis.transport.workspace.slot_bytes > 1 << 20, "it never grew"


@pytest.mark.parametrize("size", sampled([3, 2, 4], 3))
def test_same_bits_as_gloo(world, size):
    world(size).run(one_axis, 200)


def two_axes_two_grids(comm, epochs: int) -> None:
    grid = comm.grid(tp=comm.size // 2, memory=True)
    other = copy.copy(grid)  # another model's, over the same process groups
    lines = share(other, WAIT)
    assert [line.split()[2] for line in lines] == ["tp", "dp_cp", "world"]  # dp_cp_shard is dp_cp
    assert other.tp.transport.workspace is not grid.tp.transport.workspace
    assert other.dp_cp_shard.transport.workspace is other.dp_cp.transport.workspace
    assert other.dp_cp.transport.workspace is not other.tp.transport.workspace
    axes = [grid.tp, grid.dp_cp, other.tp, other.dp_cp]
    run_at_random(comm, axes, epochs, 2)


def test_two_axes_and_two_models_by_turns(world):
    world(4).run(two_axes_two_grids, 200)


def past_the_wrap(comm) -> None:
    axis = own(comm, comm.grid().dp_cp)
    axis.transport.workspace.epoch = 2**31 - 40  # a flag counts two an epoch
    axis.transport.workspace._grow(1 << 17)  # new flags start from there
    run_at_random(comm, [axis], 100, 3)


def test_epochs_wrap(world):
    world(3).run(past_the_wrap)


def overtaken(comm) -> None:
    """An all-reduce of three ranks has two phases; a later turn must not hide the second."""
    axis = own(comm, comm.grid().dp_cp)
    x = torch.full((9,), float(comm.rank + 1))
    total, summing = all_reduce(x, axis, async_op=True)
    full, gathering = all_gather(torch.full((2,), float(comm.rank)), axis, async_op=True)
    first, second = (summing, gathering) if comm.rank else (gathering, summing)
    if comm.rank == 1:
        time.sleep(0.05)
    first.wait()
    second.wait()
    assert total.tolist() == [6.0] * 9
    assert full.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_a_later_turn_does_not_hide_the_second_phase(world):
    world(3).run(overtaken)
