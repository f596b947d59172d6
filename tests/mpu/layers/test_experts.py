# SPDX-License-Identifier: Apache-2.0
"""Products of experts' rows, whose numbers change from step to step."""

import ctypes

import pytest
import torch
import torch.nn.functional as F

from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.layers.experts import RECIPE, Counts, RouterLinear, grouped_product, padded_rows
from tests.run_ranks import Allocated


def counts_of(*each: int) -> Counts:
    return Counts.of(each, torch.tensor(each))


def test_rows_are_padded_to_few_sizes():
    sizes = [padded_rows(n) for n in range(1, 1 << 16)]
    assert len(set(sizes)) == 144
    for n, size in enumerate(sizes, 1):
        assert 0 <= size - n <= max(15, n / 16)
        assert padded_rows(size) == size


def test_changing_rows_make_code_for_few_sizes():
    """oneDNN keeps code of 0.3 to 0.6 MB for each size that it has multiplied.

    Once it has seen the padded sizes, no number of rows makes more of it.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("the C library does not say what is allocated")
    libc.mallinfo2.restype = Allocated
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 40, 24, generator=g)
    grads = torch.zeros(2, 40, 24)

    def step(*each: int) -> int:
        counts, x, dy = counts_of(*each), torch.ones(sum(each), 24), torch.ones(sum(each), 40)
        grouped_product(x, weights, counts)
        grouped_product(dy, weights.transpose(1, 2), counts)
        RECIPE.accumulate(grads[0], False, x[: each[0]], dy[: each[0]])
        found = libc.mallinfo2()
        return found.uordblks + found.hblkhd

    before = [step(n, 160 - n) for n in range(16, 161, 16)][-1]
    after = [step(n, 160 - n) for n in range(1, 160)][-1]
    assert after - before < 1 << 20


@pytest.mark.parametrize("each", [(0, 5), (3, 0, 40, 1), (16, 32), (33,), (1, 1, 1), (500, 90, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_padded_products_are_those_of_the_rows(each, dtype):
    g = torch.Generator().manual_seed(sum(each))
    counts, n = counts_of(*each), sum(each)
    weights = torch.randn(len(each), 12, 20, generator=g).to(dtype)
    x = torch.randn(n, 20, generator=g).to(dtype)
    dy = torch.randn(n, 12, generator=g).to(dtype)
    close = dict(
        rtol=0, atol={torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float64: 1e-12}[dtype]
    )
    y, dx = (
        grouped_product(x, weights, counts),
        grouped_product(dy, weights.transpose(1, 2), counts),
    )
    low = 0
    for e, count in enumerate(each):
        own, other = slice(low, low + count), torch.ones(n, dtype=torch.bool)
        low, other[own] = low + count, False
        w = weights[e].double()
        torch.testing.assert_close(y[own].double(), x[own].double() @ w.t(), **close)
        torch.testing.assert_close(dx[own].double(), dy[own].double() @ w, **close)
        if not count:
            continue
        for fresh in (True, False):
            grad = torch.ones(12, 20, dtype=torch.promote_types(dtype, torch.float32))
            RECIPE.accumulate(grad, fresh, x[own], dy[own])
            right = dy[own].double().t() @ x[own].double() + (not fresh)
            torch.testing.assert_close(grad.double(), right, **close)


def test_rows_of_other_experts_change_no_bit():
    """What is not finite there does not come here."""
    x, counts = torch.randn(40, 20, generator=torch.Generator().manual_seed(1)), counts_of(9, 22, 9)
    weights = torch.ones(3, 12, 20)
    right = grouped_product(x, weights, counts)[9:31].clone()
    x[:9], x[31:] = torch.nan, torch.inf
    assert torch.equal(grouped_product(x, weights, counts)[9:31], right)


def test_a_router_multiplies_in_the_dtype_of_sums():
    """What two experts score to the last bit of fp32 is one number in bf16."""
    ctx = LayerContext(dtype=torch.bfloat16, sink=GradientSink(torch.float32))
    router = RouterLinear(64, 8, ctx=ctx)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(5, 64, generator=g).bfloat16()
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, 64, generator=g))
    logits = router(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(x.float(), router.weight.float()))
    assert not torch.equal(logits, logits.bfloat16().float())
