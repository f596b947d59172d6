# SPDX-License-Identifier: Apache-2.0
"""Column and row parallel layers against one matmul; a deferred weight gradient changes no bit."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from mpu.comm import paths
from mpu.context import LayerContext
from mpu.grid import Grid, Launch
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.param import GradientSink, run_deferred

S, B, IN, OUT = 8, 3, 12, 20


def full(name: str) -> torch.Tensor:
    shape = {"x": (S, B, IN), "w1": (OUT, IN), "w2": (IN, OUT), "dy": (S, B, IN)}[name]
    seed = sum(map(ord, name))
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def column_then_row(comm, t: int, sp: bool, deferred: bool) -> None:
    """y = row(column(x)) and all three gradients, against x w1^T w2^T."""
    grid = comm.grid(t)
    tp = grid.tp
    sink = GradientSink(torch.float64)
    ctx = LayerContext(grid, sp, torch.float64, torch.float64, sink=sink)
    column = ColumnParallelLinear(IN, (8, 12), ctx=ctx)
    row = RowParallelLinear(OUT, IN, ctx=ctx)
    w1 = torch.cat([w.chunk(t)[tp.rank] for w in full("w1").split([8, 12])])
    order = torch.cat([c.chunk(t)[tp.rank] for c in torch.arange(OUT).split([8, 12])])
    with torch.no_grad():
        column.weight.copy_(w1)
        row.weight.copy_(full("w2")[:, order])
    shard = slice(tp.rank * S // t, (tp.rank + 1) * S // t) if sp and t > 1 else slice(None)
    x = full("x")[shard].clone().requires_grad_()
    y = row(column(x))
    if deferred:
        ctx.queue.defer()
    y.backward(full("dy")[shard])
    if deferred:
        assert not ctx.sink.main, "a deferred weight gradient ran"
        run_deferred(ctx.queue.take())

    a, w1f, w2f = (full(n).requires_grad_() for n in ("x", "w1", "w2"))
    (a @ w1f.t() @ w2f.t()).backward(full("dy"))
    want_y = (full("x") @ full("w1").t() @ full("w2").t())[shard]
    got_w1, got_w2 = ctx.sink.main[column.weight], ctx.sink.main[row.weight]
    want_w1 = torch.cat([w.chunk(t)[tp.rank] for w in w1f.grad.split([8, 12])])
    for got, want in (
        (y, want_y),
        (x.grad, a.grad[shard]),
        (got_w1, want_w1),
        (got_w2, w2f.grad[:, order]),
    ):
        assert (got - want).norm() <= 1e-12 * want.norm()


def every_case(comm, t: int) -> None:
    for sp, deferred in itertools.product((False, True), repeat=2):
        column_then_row(comm, t, sp, deferred)


@pytest.mark.parametrize("size, t", [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_column_then_row(world, size, t):
    world(size).run(every_case, t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_product_is_that_of_torch(dtype):
    x, weight = torch.randn(4, 3, 16).to(dtype), torch.randn(77, 16).to(dtype)
    for w in (weight, torch.randn(16, 77).to(dtype).t()):  # as in forward, as in dgrad
        torch.testing.assert_close(paths.product(x, w), F.linear(x, w))


@pytest.mark.parametrize("build", [lambda c: ColumnParallelLinear(4, (6, 5), ctx=c),
                                   lambda c: RowParallelLinear(5, 4, ctx=c)])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(build):
    ctx = LayerContext(Grid(2, 2, launch=Launch(0, 2)))
    with pytest.raises(ValueError, match=r"\(5\) must be a multiple of the tensor-parallel size"):
        build(ctx)


def test_printing_a_layer_says_its_full_size_and_rank():
    ctx = LayerContext(Grid(2, 2, launch=Launch(1, 2)))
    assert "4 -> 6, rank 1 of 2" in repr(ColumnParallelLinear(4, 6, ctx=ctx))
