# SPDX-License-Identifier: Apache-2.0
"""Collectives against their definitions: every dtype, async or not, staged by the host or not."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mpu.comm.collectives import (
    ProcessGroupTransport,
    all_gather,
    all_reduce,
    all_reduce_in_order,
    all_to_all,
    gather_bytes,
    group_of,
    reduce_scatter,
    sum_in_order,
)
from mpu.comm.mappings import differentiable_all_to_all
from mpu.comm.meta import MetaTransport
from mpu.comm.p2p import exchange
from mpu.comm.transport import Axis, Splits
from tests.sampling import sampled

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def contribution(rank: int, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def verbs(comm, staged: bool) -> None:
    axis = comm.grid().world
    axis = replace(axis, transport=ProcessGroupTransport(group_of(axis), staged))
    n = axis.size
    for dtype in DTYPES:
        parts = [contribution(r, (2 * n, 3), dtype) for r in range(n)]
        mine = parts[axis.rank]
        in_order = parts[0]
        wide = parts[0].float() if dtype == torch.bfloat16 and n > 2 else parts[0]
        for part in parts[1:]:
            wide = wide + part
        in_order = wide.to(dtype)
        for async_op in (False, True):
            out, handle = all_gather(mine, axis, async_op)
            handle.wait()
            assert torch.equal(out, torch.cat(parts))
            out, handle = reduce_scatter(mine, axis, async_op)
            handle.wait()
            handle.wait()  # a second wait does nothing
            assert torch.equal(out, in_order[2 * axis.rank : 2 * axis.rank + 2])
            out, handle = all_to_all(mine, axis, async_op)
            handle.wait()
            own = slice(2 * axis.rank, 2 * axis.rank + 2)
            assert torch.equal(out, torch.cat([part[own] for part in parts]))
            out, handle = all_reduce(mine.clone(), axis, async_op)
            handle.wait()
            torch.testing.assert_close(out, in_order, rtol=2e-2, atol=2e-2)
        odd = mine.reshape(-1)[: 2 * n + 1].clone()  # does not divide by the axis
        assert torch.equal(all_reduce_in_order(odd, axis), in_order.reshape(-1)[: 2 * n + 1])
        if dtype != torch.bfloat16 or n == 2:  # few numbers: summed in their own dtype
            assert torch.equal(sum_in_order(mine, axis), in_order)
        assert torch.equal(mine, contribution(axis.rank, (2 * n, 3), dtype)), "an input changed"
        strided = mine.t().contiguous().t()  # not contiguous
        assert torch.equal(all_gather(strided, axis)[0], torch.cat(parts))
        assert torch.equal(all_to_all(strided, axis)[0], all_to_all(mine, axis)[0])
    words = [b"", b"\x00\xff", b"x" * 1000]
    assert gather_bytes(words[axis.rank % 3], axis) == [words[r % 3] for r in range(n)]


@pytest.mark.parametrize("size", sampled([4, 2], 2))
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_verbs(world, size, staged):
    world(size).run(verbs, staged)


class Heard:
    """A trace that keeps the verbs, and what is sent for each."""

    def __init__(self) -> None:
        self.verbs: list[tuple[str, int]] = []

    def issued(self, verb, axis, tensor, sent, is_async, label):
        self.verbs.append((verb, sent))
        return self

    def waiting(self):
        pass

    def waited(self):
        self.verbs.append(("waited", 0))


def traced(comm, meta: bool) -> list:
    """Return the shapes, and what a trace heard of each verb, for real tensors or their shapes."""
    heard = Heard()
    axis = replace(comm.grid().world, trace=heard)
    if meta:
        axis = replace(axis, transport=MetaTransport())
    x = torch.ones(4 * axis.size, 3, device="meta" if meta else "cpu")
    shapes = []
    for verb in (all_gather, reduce_scatter, all_reduce, all_to_all):
        out, handle = verb(x, axis, True)
        handle.wait()
        shapes.append(tuple(out.shape))
    right, left = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    exchange(x, axis, right, left, torch.empty_like(x)).wait()
    shapes += [tuple(sum_in_order(x, axis).shape), tuple(all_reduce_in_order(x, axis).shape)]
    return [shapes, heard.verbs]


def test_shapes_travel_as_tensors_do(world):
    for real, shapes in zip(world(2).run(traced, False), world(2).run(traced, True), strict=True):
        assert real == shapes and len(real[1]) == 16


def test_one_rank_needs_no_group():
    x = torch.randn(3, 2)
    for verb in (all_gather, reduce_scatter, all_reduce, all_to_all):
        out, handle = verb(x, Axis("tp"), True)
        handle.wait()
        assert out is x
    assert gather_bytes(b"a", Axis("tp")) == [b"a"]


TABLES = {  # rows that rank i sends to rank j, for any number of ranks
    "uneven": lambda i, j: 1 + (2 * i + 3 * j) % 5,
    "some empty": lambda i, j: (i + j) % 3,
    "one rank sends all": lambda i, j: (j + 2) if i == 0 else 0,
    "one rank gets all": lambda i, j: (i + 1) if j == 0 else 0,
    "nothing at all": lambda i, j: 0,
    "even": lambda i, j: 3,
}


def splits_of(table: str, axis: Axis) -> tuple[Splits, list[list[int]]]:
    rows = [[TABLES[table](i, j) for j in range(axis.size)] for i in range(axis.size)]
    return Splits(tuple(rows[axis.rank]), tuple(row[axis.rank] for row in rows)), rows


def twin(rows: list[list[int]], rank: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return every rank's input, and this rank's output, worked out in one process."""
    every = [contribution(r, (sum(row), 3), dtype) for r, row in enumerate(rows)]
    parts = [x.split(row)[rank] for x, row in zip(every, rows, strict=True)]
    return every, torch.cat(parts)


def uneven(comm, carrier: str) -> None:
    """Exchange by every table, asynchronously or not; outputs and gradients are the twin's."""
    axis = comm.grid(memory=carrier == "memory").dp_cp
    if carrier == "staged":
        axis = replace(axis, transport=ProcessGroupTransport(group_of(axis), staged=True))
    for table in TABLES:
        splits, rows = splits_of(table, axis)
        for dtype in DTYPES:
            every, expected = twin(rows, axis.rank, dtype)
            for async_op in (False, True):
                out, handle = all_to_all(every[axis.rank], axis, async_op, splits)
                handle.wait()
                assert out.dtype == dtype and torch.equal(out, expected), (table, dtype)
            strided = every[axis.rank].t().contiguous().t()
            assert torch.equal(all_to_all(strided, axis, splits=splits)[0], expected)
            x = every[axis.rank].clone().requires_grad_()
            y = differentiable_all_to_all(x, axis, splits)
            assert torch.equal(y, expected)
            # the serial twin: each row is worth its number in its reader's loss
            outputs = [twin(rows, r, dtype)[1] for r in range(axis.size)]
            weights = [contribution(100 + r, tuple(y.shape), dtype) for r, y in enumerate(outputs)]
            (y * weights[axis.rank]).sum().backward()
            columns = [w.split([row[r] for row in rows]) for r, w in enumerate(weights)]
            assert torch.equal(x.grad, torch.cat([parts[axis.rank] for parts in columns])), table
    full = torch.arange(2.0 * axis.size, requires_grad=True)
    differentiable_all_to_all(full, axis).sum().backward()
    assert full.grad.tolist() == [1.0] * (2 * axis.size)


@pytest.mark.parametrize("carrier", ["group", "staged", "memory"])
@pytest.mark.parametrize("size", sampled([4, 2, 1], 2))
def test_uneven_all_to_all(world, size, carrier):
    if size == 1 and carrier != "group":
        axis = Axis("ep")  # one rank has no transport
        assert all_to_all(torch.ones(3), axis, splits=Splits((3,), (3,)))[0].sum() == 3
        return
    world(size).run(uneven, carrier)


def of_shapes(comm, meta: bool) -> list:
    """Return the shapes of uneven exchanges, and the bytes that a trace heard of."""
    heard, shapes = Heard(), []
    axis = replace(comm.grid().world, trace=heard)
    axis = replace(axis, transport=MetaTransport()) if meta else axis
    for table in TABLES:
        splits, rows = splits_of(table, axis)
        x = torch.ones(sum(splits.input), 3, device="meta" if meta else "cpu", requires_grad=True)
        y = differentiable_all_to_all(x, axis, splits)
        y.backward(torch.ones_like(y))
        shapes += [tuple(y.shape), tuple(x.grad.shape)]
        away = sum(splits.input) - splits.input[axis.rank]
        assert ("all_to_all", away * 3 * 4) in heard.verbs
    return [shapes, heard.verbs]


def test_uneven_shapes_travel_as_tensors_do(world):
    assert world(4).run(of_shapes, False) == world(4).run(of_shapes, True)


UNLIKE = Splits((1, 1), (1, 0)), Splits((0, 2), (2, 2))


def unlike(comm) -> None:
    axis = comm.grid(memory=True).dp_cp
    with pytest.raises(ValueError, match="rank 0 sends 1 rows to rank 1, which expects 2"):
        all_to_all(torch.ones(2), axis, splits=UNLIKE[comm.rank])
    total, _ = all_reduce(torch.ones(3), axis)  # the memory is as before
    assert total.tolist() == [2.0] * 3


def test_ranks_that_expect_other_rows_are_named(world):
    world(2).run(unlike)


def test_splits_cover_the_rows():
    with pytest.raises(AssertionError, match="cover dim 0"):
        all_to_all(torch.ones(3), Axis("ep"), splits=Splits((2,), (2,)))
