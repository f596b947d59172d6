# SPDX-License-Identifier: Apache-2.0
"""A parameter's placement; the sink's arithmetic; initial weights are the same in every layout."""

import weakref

import pytest
import torch
from torch import nn

from mpu.comm.transport import Axis
from mpu.gradients import GradientSink, WeightGradientQueue, run_deferred, use
from mpu.layers.linear import Recipe
from mpu.param import Placement, divide, draw_normal, parameter, placement_of


def axis(rank: int, size: int) -> Axis:
    return Axis("tp", rank, size, tuple(range(size)))


def place(kind: str, tp: Axis) -> Placement:
    t = tp.size
    if kind == "fused":  # q, k, v of 8, 4 and 4 rows
        return Placement((16, 6), 0, tp, (8, 4, 4), 16 // t)
    if kind == "vocabulary":  # 13 rows, padded to a multiple of 3 t
        return Placement((13, 6), 0, tp, (13,), -(-13 // (3 * t)) * 3)
    if kind == "row":
        return Placement((5, 8), 1, tp, (), 8 // t)
    return Placement((6, 2), None, tp)


NAMES = {"fused": ("q", "k", "v"), "vocabulary": ("e",), "row": ("d",), "replicated": ("n",)}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_pieces_tile_the_full_tensor(kind, size):
    """Every row of every canonical tensor is held exactly once (or by all, where replicated)."""
    seen: dict[str, torch.Tensor] = {}
    for rank in range(size):
        placement = place(kind, axis(rank, size))
        for piece in placement.pieces(NAMES[kind]):
            count = seen.setdefault(piece.name, torch.zeros(piece.shape))
            count.narrow(piece.dim, piece.start, piece.size).add_(1)
            assert piece.local + piece.size <= placement.local_shape[piece.dim]
    expected = size if kind == "replicated" else 1
    assert all(bool((count == expected).all()) for count in seen.values())
    holders = [place(kind, axis(r, size)).first_holder for r in range(size)]
    assert sum(holders) == (1 if kind == "replicated" else size)


@pytest.mark.parametrize("kind", NAMES)
def test_initial_weights_do_not_depend_on_the_layout(kind):
    def drawn(rank: int, size: int) -> dict:
        param = parameter(place(kind, axis(rank, size)), torch.float32, torch.device("cpu"))
        draw_normal(param, NAMES[kind], 0.5, seed=11)
        found = {}
        for p in placement_of(param).pieces(NAMES[kind]):
            found[p.name] = (p, param.detach().narrow(p.dim, p.local, p.size))
        return found

    by_name = drawn(0, 1)
    for size in (2, 4):
        for rank in range(size):
            for name, (piece, local) in drawn(rank, size).items():
                full = by_name[name][1]
                assert torch.equal(local, full.narrow(piece.dim, piece.start, piece.size))
    values = torch.cat([v.flatten() for _, v in by_name.values()])
    assert 0.3 < values.std() < 0.7 and values.unique().numel() == values.numel()


def test_large_weights_are_drawn_by_blocks(monkeypatch):
    """Above 2^20 elements the draw goes block by block; a rank that skips blocks gets the same
    rows.
    """
    rows = 3000
    full = parameter(Placement((rows, 1024)), torch.float32, torch.device("cpu"))
    draw_normal(full, ("w",), 1.0, seed=1)
    half = Placement((rows, 1024), 0, axis(1, 2), (rows,), rows // 2)
    part = parameter(half, torch.float32, torch.device("cpu"))
    draw_normal(part, ("w",), 1.0, seed=1)
    assert torch.equal(part, full[rows // 2 :])


def test_a_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"heads \(7\) must be a multiple of the .* size \(2\)"):
        divide("tensor-parallel", 7, axis(0, 2), "heads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_sink_sums_contributions(dtype):
    sink = GradientSink(torch.float64 if dtype == torch.float64 else torch.float32)
    weight = nn.Parameter(torch.zeros(5, 3, dtype=dtype))
    for _ in range(2):  # the second step starts from nothing
        sink.begin_step()
        total = torch.zeros(5, 3, dtype=torch.float64)
        for _ in range(3):
            x, dy = torch.randn(7, 3).to(dtype), torch.randn(7, 5).to(dtype)
            Recipe().accumulate(*sink.grad_slot(weight), x, dy)
            total += dy.double().t() @ x.double()
        grad = torch.randn(5, 3)
        sink.add(weight, grad)
        rows = torch.tensor([0, 4, 4])
        sink.add_rows(weight, rows, torch.ones(3, 3, dtype=dtype))
        total += grad
        total.index_add_(0, rows, torch.ones(3, 3, dtype=torch.float64))
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-6
        assert (sink.main_grad(weight).double() - total).norm() < tolerance * total.norm()
    assert weight.grad is None


def test_rows_added_first_start_from_zero():
    sink, weight = GradientSink(), nn.Parameter(torch.zeros(3, 2))
    sink.main_grad(weight).fill_(7.0)
    sink.begin_step()
    sink.add_rows(weight, torch.tensor([1]), torch.ones(1, 2))
    assert sink.main_grad(weight).tolist() == [[0, 0], [1, 1], [0, 0]]


def test_use_sends_an_ordinary_gradient_to_the_sink():
    class Counting(GradientSink):
        finished = 0

        def register_grad_ready(self, param):
            self.finished += 1

    sink, weight = Counting(), nn.Parameter(torch.tensor([2.0, 3.0]))
    (use(weight, sink).square().sum() * 2).backward()
    assert weight.grad is None and sink.finished == 1
    assert sink.main_grad(weight).tolist() == [8.0, 12.0]


def test_the_queue_keeps_order():
    queue, seen = WeightGradientQueue(), []
    queue.put(lambda: seen.append(0))
    assert seen == [0] and not queue.defers()
    queue.defer()
    queue.put(lambda: seen.append(1))
    queue.put(lambda: seen.append(2))
    assert seen == [0] and queue.defers()
    kept = queue.take()
    queue.put(lambda: seen.append(3))
    assert seen == [0, 3] and not queue.defers()
    run_deferred(kept)
    assert seen == [0, 3, 1, 2] and not kept


def test_the_queue_keeps_the_output_layers_alone():
    queue, seen = WeightGradientQueue(), []
    queue.defer(output_layer_only=True)
    assert queue.defers(output_layer=True) and not queue.defers()
    queue.put(lambda: seen.append(0), (), output_layer=True)
    queue.put(lambda: seen.append(1))
    kept = queue.take()
    queue.defer()  # of all layers again
    queue.put(lambda: seen.append(2))
    assert seen == [1] and len(queue.take()) == len(kept) == 1
    run_deferred(kept)
    assert seen == [1, 0]


def test_a_deferred_gradient_is_freed_as_soon_as_it_is_done():
    queue, refs, alive = WeightGradientQueue(), [], []
    queue.defer()
    for _ in range(3):
        x = torch.ones(4)
        refs.append(weakref.ref(x))
        queue.put(lambda x=x: alive.append(sum(ref() is not None for ref in refs)))
    del x
    run_deferred(queue.take())
    assert alive == [3, 2, 1]
