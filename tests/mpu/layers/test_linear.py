# SPDX-License-Identifier: Apache-2.0
"""Column and row parallel layers: a deferred weight gradient changes no bit, shapes are checked."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mpu.context import LayerContext
from mpu.gradients import run_deferred
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.cross_entropy import vocab_parallel_cross_entropy
from mpu.layers.linear import ColumnParallelLinear, Recipe, RowParallelLinear
from mpu.layers.linear_cross_entropy import linear_cross_entropy

S, B, IN, OUT = 8, 3, 12, 20


def test_a_weight_gradient_that_waits_keeps_no_graph():
    """What waits is x and dy: the stage's input, a leaf of the graph, is freed by backward."""
    ctx = LayerContext(Grid(1, launch=Launch(0, 1)), False, torch.float32, torch.float32)
    column = ColumnParallelLinear(IN, OUT, ctx=ctx)
    row = RowParallelLinear(OUT, 7, ctx=ctx)
    for layer in (column, row):
        torch.nn.init.ones_(layer.weight)
    hidden = torch.randn(S, B, IN, requires_grad=True)
    labels = torch.zeros(S, B, dtype=torch.long)
    loss = vocab_parallel_cross_entropy(row(column(hidden * 2.0)), labels, 7, ctx).sum()
    ctx.queue.defer()
    loss.backward()
    freed = weakref.ref(hidden)
    del hidden, loss
    assert freed() is None and len(works := ctx.queue.take()) == 2
    run_deferred(works)
    assert ctx.sink.main[column.weight].norm() > 0


def test_a_loss_in_chunks_that_waits_keeps_no_graph():
    ctx = LayerContext(Grid(1, launch=Launch(0, 1)), False, torch.float32, torch.float32)
    head = ColumnParallelLinear(IN, 7, ctx=ctx)
    head.output_layer = True
    torch.nn.init.ones_(head.weight)
    hidden = torch.randn(S, B, IN, requires_grad=True)
    labels = torch.zeros(S, B, dtype=torch.long)
    loss = linear_cross_entropy(head, hidden * 2.0, labels, 7).sum()
    ctx.queue.defer()
    loss.backward()
    freed = weakref.ref(hidden)
    del hidden, loss
    assert freed() is None and len(works := ctx.queue.take()) == 1
    run_deferred(works)
    assert ctx.sink.main[head.weight].norm() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_product_is_that_of_torch(dtype):
    x, weight = torch.randn(4, 3, 16).to(dtype), torch.randn(77, 16).to(dtype)
    for w in (weight, torch.randn(16, 77).to(dtype).t()):  # as in forward, as in dgrad
        torch.testing.assert_close(Recipe().product(x, w), F.linear(x, w))


@pytest.mark.parametrize("build", [lambda c: ColumnParallelLinear(4, (6, 5), ctx=c),
                                   lambda c: RowParallelLinear(5, 4, ctx=c)])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(build):
    ctx = LayerContext(Grid(2, 2, launch=Launch(0, 2)))
    with pytest.raises(ValueError, match=r"\(5\) must be a multiple of the tensor-parallel size"):
        build(ctx)


def test_printing_a_layer_says_its_full_size_and_rank():
    ctx = LayerContext(Grid(2, 2, launch=Launch(1, 2)))
    assert "4 -> 6, rank 1 of 2" in repr(ColumnParallelLinear(4, 6, ctx=ctx))


class Made(TorchDispatchMode):
    """Notes the bytes of each storage that an operation makes."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.kept, self.nbytes = [*known], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storage = out.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.kept.append(out)  # so that no other storage gets its address
            self.nbytes.append(storage.nbytes())
        return out


@pytest.mark.parametrize(
    "dtype, main",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
     (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)],
)  # fmt: skip
def test_a_recorded_weight_gradient_takes_the_memory_of_a_real_one(dtype, main):
    """Of a CPU, where a product of fp32 or of another dtype is made first."""
    found = []
    for device in ("cpu", "meta"):
        ctx = LayerContext(dtype=dtype, device=torch.device(device), on_gpu=False)
        recipe = ColumnParallelLinear(7, 5, ctx=ctx).recipe
        main_grad = torch.zeros(5, 7, device=device, dtype=main)
        x, dy = (torch.zeros(9, n, device=device, dtype=dtype) for n in (7, 5))
        for fresh in (True, False):
            with Made(main_grad, x, dy) as made:
                recipe.accumulate(main_grad, fresh, x, dy)
            found.append(made.nbytes)
    assert found[:2] == found[2:]


def test_a_recipe_of_another_device_is_refused():
    ctx = LayerContext(device=torch.device("meta"), on_gpu=True)
    with pytest.raises(ValueError, match="Recipe was made with on_gpu=False, but its layer's"):
        ColumnParallelLinear(4, 8, ctx=ctx, recipe=Recipe())
    assert ColumnParallelLinear(4, 8, ctx=ctx).recipe.on_gpu


def test_a_weight_gradient_is_one_matmul_where_it_is_summed_in_fp32():
    """On a GPU: no pass over the gradient beside the matmul."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            if func is aten.addmm.dtype_out:  # torch 2.11 cannot compute it on meta tensors
                return kwargs["out"]
            return func(*args, **(kwargs or {}))

    aten = torch.ops.aten
    called: list[object] = []
    main_grad = torch.empty(5, 7, device="meta")
    x, dy = (torch.empty(9, n, device="meta", dtype=torch.bfloat16) for n in (7, 5))
    for fresh, operation in ((True, aten.mm.dtype_out), (False, aten.addmm.dtype_out)):
        called.clear()
        with Seen():
            Recipe(on_gpu=True).accumulate(main_grad, fresh, x, dy)
        assert [f for f in called if f is not aten.t.default] == [operation]
