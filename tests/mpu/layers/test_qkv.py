# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a key/value head make what one rank makes, forward and backward."""

from types import SimpleNamespace

import pytest
import torch

from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.linear import ColumnParallelLinear
from mpu.layers.qkv import SharedHeadsLinear, local_heads, qkv_linear
from mpu.param import draw_normal, placement_of

H, D, HEADS, S, B = 10, 8, 8, 4, 3
NAMES = ("q", "k", "v")


def made(grid: Grid, groups: int, sp: bool) -> ColumnParallelLinear:
    wide = torch.float64
    ctx = LayerContext(grid, sp, wide, wide, sink=GradientSink(wide))
    layer = qkv_linear(H, (HEADS * D, groups * D, groups * D), ctx=ctx)
    draw_normal(layer.weight, NAMES, 1.0, seed=3)
    return layer


def inputs(groups: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return x [S, B, H], and what reaches q, k, v of each query head: [S, B, heads, D] each."""
    g = torch.Generator().manual_seed(groups)
    x = torch.randn(S, B, H, generator=g, dtype=torch.float64)
    return x, [torch.randn(S, B, HEADS, D, generator=g, dtype=torch.float64) for _ in NAMES]


def run(comm, groups: int, sp: bool) -> dict:
    """Return this rank's output, dx and weight gradient, of a loss that each query head adds to."""
    grid = comm.grid(comm.size, memory=True, query_groups=groups)
    layer = made(grid, groups, sp)
    heads, shared = local_heads(HEADS, groups, D, layer.ctx)
    assert (heads, shared) == (HEADS // comm.size, max(1, groups // comm.size))
    x, upstream = inputs(groups)
    x = (x.chunk(comm.size)[comm.rank] if sp else x).clone().requires_grad_()
    y = layer(x)
    q, k, v = y.unflatten(-1, (-1, D)).split([heads, shared, shared], dim=2)
    mine = slice(comm.rank * heads, (comm.rank + 1) * heads)
    per_query = [t.repeat_interleave(heads // shared, 2) for t in (k, v)]
    sum(
        (t * up[:, :, mine]).sum() for t, up in zip((q, *per_query), upstream, strict=True)
    ).backward()
    gradient = layer.ctx.sink.main_grad(layer.weight)
    pieces = [
        (piece.name, piece.start, gradient[piece.local : piece.local + piece.size])
        for piece in placement_of(layer.weight).pieces(NAMES)
    ]
    made_of = [t.detach() for t in (q, k, v)]
    return {"kind": type(layer).__name__, "heads": made_of, "dx": x.grad, "pieces": pieces}


@pytest.mark.parametrize("size, groups", [(2, 1), (4, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("sp", [False, True])
def test_ranks_make_the_heads_and_gradients_of_one(world, size, groups, sp):
    twin, (x, upstream) = made(Grid(), groups, False), inputs(groups)
    x.requires_grad_()
    weight = twin.weight.detach().clone().requires_grad_()
    y = (x @ weight.t()).unflatten(-1, (-1, D))
    parts = list(y.split([HEADS, groups, groups], dim=2))
    wide = [parts[0], *(t.repeat_interleave(HEADS // groups, 2) for t in parts[1:])]
    sum((t * up).sum() for t, up in zip(wide, upstream, strict=True)).backward()
    full = dict(zip(NAMES, weight.grad.split([HEADS * D, groups * D, groups * D]), strict=True))
    covered = dict.fromkeys(NAMES, 0)
    share, kind = max(1, size // groups), type(made(Grid(), groups, False)).__name__
    kind = "SharedHeadsLinear" if groups < size else kind
    results = world(size).run(run, groups, sp)
    for rank, result in enumerate(results):
        assert result["kind"] == kind
        for name, mine, whole in zip(NAMES, result["heads"], parts, strict=True):
            n = mine.shape[2]
            first = rank * n if name == "q" else rank // share * n
            want = whole[:, :, first : first + n].detach()
            torch.testing.assert_close(mine, want, atol=1e-12, rtol=1e-12)
        dx = x.grad.chunk(size)[rank] if sp else x.grad
        torch.testing.assert_close(result["dx"], dx, atol=1e-12, rtol=1e-12)
        for name, start, got in result["pieces"]:
            covered[name] += len(got)
            want = full[name][start : start + len(got)]
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    assert covered == {name: len(grad) for name, grad in full.items()}, "a row has one owner"


@pytest.mark.parametrize(
    "heads, groups, size, words",
    [
        (6, 2, 4, "heads must be a multiple of it"),
        (12, 3, 4, "groups a multiple or a divisor of it"),
        (12, 6, 4, "groups a multiple or a divisor of it"),
    ],
)
def test_heads_that_do_not_divide_are_refused(heads, groups, size, words):
    ctx = SimpleNamespace(tp=SimpleNamespace(size=size), grid=Grid())
    with pytest.raises(ValueError, match=words):
        local_heads(heads, groups, D, ctx)


def test_a_grid_for_other_heads_is_refused():
    ctx = LayerContext(Grid(4, 4, launch=Launch(0, 4), query_groups=2))
    assert local_heads(8, 2, D, ctx) == (2, 1) and local_heads(8, 2, 6, ctx) == (2, 1)
    with pytest.raises(ValueError, match="lets 2 of them share a key/value head"):
        local_heads(8, 1, D, ctx)
    with pytest.raises(ValueError, match="a head of size 7 .* cut over 2 of the 4"):
        local_heads(8, 2, 7, ctx)
    assert isinstance(qkv_linear(H, (64, 16, 16), ctx=ctx), SharedHeadsLinear)
