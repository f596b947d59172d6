# SPDX-License-Identifier: Apache-2.0
"""The fused operations of csrc/ against their torch twins: same formulas, forward and backward.

Each case runs a layer with the compiled library and without, and compares both with an fp64 run of
the twin: the library may be off by a rounding or two more.
"""

import pytest
import torch

from mpu import native
from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.layers.cross_entropy import vocab_parallel_cross_entropy
from mpu.layers.fused import RMSNorm, apply_rope, fits, swiglu
from mpu.layers.rope import rope_frequencies, rope_table

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _built():
    if native.load() is None:
        pytest.skip(native.reason())


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def norm(dtype, rows, h):
    """Return output, input gradient and weight gradient."""
    ctx = LayerContext(dtype=dtype, accumulate=wide(dtype), sink=GradientSink(wide(dtype)))
    layer = RMSNorm(h, ctx=ctx, eps=1e-3)
    x, dy = torch.randn(rows, 1, h), torch.randn(rows, 1, h)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(h).bfloat16())
    x = x.bfloat16().to(dtype).requires_grad_()  # the same numbers in every dtype
    y = layer(x)
    y.backward(dy.bfloat16().to(dtype))
    return y.detach(), x.grad, ctx.sink.main[layer.weight]


def glu(dtype, rows, f):
    x = (torch.randn(rows, 1, 2 * f) * 4).bfloat16()
    x[0, 0, :2] = torch.tensor([200.0, -200.0])[: min(2, 2 * f)]  # where the sigmoid is 1 or 0
    x = x.to(dtype).requires_grad_()
    y = swiglu(x)
    y.backward(torch.randn(rows, 1, f).bfloat16().to(dtype))
    return y.detach(), x.grad


def turn(dtype, rows, h):
    b, n, d = 3, 5, 2 * h
    x = torch.randn(rows, b, n, d).bfloat16().to(dtype).requires_grad_()
    cos, sin = rope_table(rope_frequencies(d, 100.0), rows + 7, wide(dtype), torch.device("cpu"))
    at = torch.randint(0, rows + 7, (rows, b))
    shared = apply_rope(x, cos[:rows], sin[:rows], 4)
    own = apply_rope(x, cos[at, 0], sin[at, 0], 4)  # positions of each row of the batch
    dy = torch.randn(2, rows, b, n, d).bfloat16().to(dtype)
    torch.autograd.backward([shared, own], list(dy))
    return shared.detach(), own.detach(), x.grad


def entropy(dtype, rows, v):
    ctx = LayerContext(dtype=dtype, accumulate=wide(dtype))
    logits = (torch.randn(rows, 1, v + 3) * 10).bfloat16().to(dtype).requires_grad_()
    labels = torch.randint(0, v, (rows, 1))
    weight = torch.rand(rows, 1).bfloat16().to(wide(dtype))
    loss = vocab_parallel_cross_entropy(logits, labels, v, ctx)  # three columns are padding
    (loss * weight).sum().backward()
    assert not logits.grad[..., v:].any()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("operation", [norm, glu, turn, entropy])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 17), (300, 64), (70, 1000)])
@pytest.mark.parametrize("threads", [1, 2])
def test_fused_equals_its_twin(operation, dtype, rows, width, threads, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(rows)
        fused = operation(dtype, rows, width)
        monkeypatch.setattr(native, "load", lambda: None)
        torch.manual_seed(rows)
        exact = operation(torch.float64, rows, width)
    finally:
        torch.set_num_threads(before)
    for got, want in zip(fused, exact, strict=True):
        eps = torch.finfo(got.dtype).eps
        assert torch.isfinite(got).all()
        error = (got.double() - want).norm()
        assert error <= 8 * eps * (want.norm() + 1), f"{error / want.norm():.1e}"  # inputs are ~ 1


def test_the_sigmoid_is_good_to_a_few_units_in_the_last_place():
    """silu(x) = x sigmoid(x), over the range where the sigmoid is neither 0 nor 1."""
    g = torch.linspace(-60, 60, 200_001)
    got = swiglu(torch.stack([g, torch.ones_like(g)], -1)[:, None]).flatten().double()
    want = g.double() * torch.sigmoid(g.double())
    assert ((got - want).abs() <= 4 * 2**-23 * want.abs()).all()


def test_a_not_a_number_stays_one():
    for dtype in DTYPES:
        x = torch.full((1, 1, 8), float("nan"), dtype=dtype)
        assert swiglu(x).isnan().all()


def test_what_does_not_fit_goes_to_the_twin():
    assert fits(torch.zeros(2, 2))
    assert not fits(torch.zeros(2, 2, dtype=torch.float16))
    assert not fits(torch.zeros(2, 2).t()[:1])
    assert not fits(torch.zeros(2, 2, device="meta"))
    assert not fits(torch.zeros(2), torch.zeros(2).bfloat16())
    assert not fits(torch.zeros(2), accumulate=torch.float64)
    assert fits(torch.zeros(2).bfloat16(), accumulate=torch.float32)
