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
from mpu.layers.fused import ResidualRMSNorm, RMSNorm, apply_rope, fits, swiglu
from mpu.layers.linear import ColumnParallelLinear
from mpu.layers.rope import rope_frequencies, rope_table
from tests.sampling import sampled

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


def add_norm(dtype, rows, h):
    """Return both outputs, the gradient of both inputs and that of the weight."""
    ctx = LayerContext(dtype=dtype, accumulate=wide(dtype), sink=GradientSink(wide(dtype)))
    layer = ResidualRMSNorm(h, ctx=ctx, eps=1e-3)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(h).bfloat16())
    x, branch = (torch.randint(-99, 99, (rows, 1, h)) / 16 for _ in range(2))  # exact sums
    x, branch = (t.to(dtype).requires_grad_() for t in (x, branch))
    y, stream = layer(x, branch)
    dy = torch.randn(2, rows, 1, h).bfloat16().to(dtype)
    torch.autograd.backward([y, stream], list(dy))
    assert torch.equal(x.grad, branch.grad)
    return y.detach(), stream.detach(), x.grad, ctx.sink.main[layer.weight]


def turn(dtype, rows, h):
    b, d = 3, 2 * min(h, 150)
    x = torch.randn(rows, b, 5 * d).bfloat16().to(dtype).requires_grad_()
    cos, sin = rope_table(rope_frequencies(d, 100.0), rows + 7, wide(dtype), torch.device("cpu"))
    at = torch.randint(0, rows + 7, (rows, b))
    shared = torch.cat(apply_rope(x, cos[:rows], sin[:rows], 3, 1), 2)
    own = torch.cat(apply_rope(x, cos[at, 0], sin[at, 0], 3, 1), 2)  # positions of each row
    dy = torch.randn(2, rows, b, 5, d).bfloat16().to(dtype)
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


@pytest.mark.parametrize("operation", [norm, add_norm, glu, turn, entropy])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(
    "rows, width, threads",
    sampled([(3, 17, 1), (70, 1000, 2)], 2),
)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("rows, h", [(3, 17), (70, 1000)])
def test_add_and_norm_in_one_pass_have_the_bits_of_both(dtype, rows, h):
    """Forward and backward, of a stream to which a branch was added and of one alone."""
    ctx = LayerContext(dtype=dtype, accumulate=wide(dtype), sink=GradientSink(wide(dtype)))
    fused, plain = ResidualRMSNorm(h, ctx=ctx), RMSNorm(h, ctx=ctx)
    weight = torch.randn(h)
    for layer in (fused, plain):
        layer.weight.data.copy_(weight)
    x, branch, dy, dh = torch.randn(4, rows, 2, h).to(dtype)
    for given in ((x, branch), (x,)):
        once, twice = ([t.clone().requires_grad_() for t in given] for _ in range(2))
        y, stream = fused(*once)
        total = sum(twice[1:], start=twice[0])
        norm = plain(total)
        assert torch.equal(y, norm) and torch.equal(stream, total)
        torch.autograd.backward([y, stream], [dy, dh])
        torch.autograd.backward([norm, total], [dy, dh])
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(once, twice, strict=True))
        assert torch.equal(ctx.sink.main[fused.weight], ctx.sink.main[plain.weight])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_rope_in_a_matmuls_own_memory(dtype):
    """It has the bits of the rotation elsewhere; recomputation and a leaf keep their qkv."""
    ctx = LayerContext(dtype=dtype, accumulate=wide(dtype), sink=GradientSink(wide(dtype)))
    linear = ColumnParallelLinear(6, 40, ctx=ctx)
    linear.weight.data.normal_()
    cos, sin = rope_table(rope_frequencies(8, 100.0), 7, wide(dtype), torch.device("cpu"))
    x, dy = torch.randn(7, 2, 6).to(dtype), torch.randn(7, 2, 5, 8).to(dtype)
    found = []
    for own in (True, False):
        given = x.clone().requires_grad_()
        qkv = linear(given)
        before = qkv.detach().clone()
        turned = apply_rope(qkv if own else qkv.view_as(qkv), cos, sin, 3, 1)
        assert torch.equal(qkv, before) != own and (turned[0].data_ptr() == qkv.data_ptr()) == own
        torch.cat(turned, 2).backward(dy)
        found.append((*turned, given.grad, ctx.sink.main[linear.weight].clone()))
        ctx.sink.begin_step()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        qkv = linear(x)
        before = qkv.clone()
        apply_rope(qkv, cos, sin, 3, 1)
    assert torch.equal(qkv, before)


def test_what_is_rotated_in_place_is_not_rotated_again():
    """A layer that attends twice by one projection."""
    ctx = LayerContext(dtype=torch.float64, sink=GradientSink(torch.float64))
    linear = ColumnParallelLinear(6, 40, ctx=ctx)
    cos, sin = rope_table(rope_frequencies(8, 100.0), 7, torch.float64, torch.device("cpu"))
    qkv = linear(torch.randn(7, 2, 6, dtype=torch.float64).requires_grad_())
    first = apply_rope(qkv.clone(), cos, sin, 3, 1)
    second = apply_rope(qkv, cos, sin, 3, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(ValueError, match=r"already rotated, in place: .* qkv.clone\(\)"):
        apply_rope(qkv, cos, sin, 3, 1)


def test_who_saved_qkv_before_it_was_rotated_gets_an_error():
    ctx = LayerContext()
    linear = ColumnParallelLinear(6, 40, ctx=ctx)
    linear.weight.data.normal_()
    cos, sin = rope_table(rope_frequencies(8, 100.0), 7, torch.float32, torch.device("cpu"))
    qkv = linear(torch.randn(7, 2, 6, requires_grad=True))
    saved = qkv.square().sum()
    apply_rope(qkv, cos, sin, 3, 1)
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        saved.backward()


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
    assert fits(torch.zeros(2, 2, device="meta"))
    assert not fits(torch.zeros(2), torch.zeros(2).bfloat16())
    assert not fits(torch.zeros(2), accumulate=torch.float64)
    assert fits(torch.zeros(2).bfloat16(), accumulate=torch.float32)


def test_shapes_that_would_be_read_past_their_end_are_refused():
    """The library reads by address: what torch would broadcast or refuse, it would not see."""
    ctx = LayerContext()
    norm, stream = RMSNorm(4, ctx=ctx), ResidualRMSNorm(8, ctx=ctx)
    with pytest.raises(ValueError, match=r"a norm of 4 features got \(3, 2, 8\)"):
        norm(torch.zeros(3, 2, 8))
    with pytest.raises(ValueError, match=r"8 features .* and a branch \(3, 2, 1\)"):
        stream(torch.zeros(3, 2, 8), torch.zeros(3, 2, 1))
    with pytest.raises(ValueError, match=r"gate and up are \(3, 7\): the last dim must be even"):
        swiglu(torch.zeros(3, 7))
    qkv = torch.zeros(3, 2, 32)  # heads of 8
    for shape in ((3, 1, 1, 5), (3, 1, 1, 2), (2, 1, 1, 4), (3, 3, 1, 4), (3, 1, 4)):
        with pytest.raises(ValueError, match="must be .3, 1 or 2, 1, 4.: .tokens, 1 or batch"):
            apply_rope(qkv, torch.zeros(shape), torch.zeros(shape), 2, 1)
    whole = torch.zeros(3, 1, 1, 4)
    with pytest.raises(ValueError, match="must be .3, 1 or 2, 1, 2.: .tokens, 1 or batch"):
        apply_rope(qkv, whole, whole, 2, 1, rotary=4)


def test_a_part_of_a_head_is_rotated():
    """The first 4 of 8 elements as a head of 4, the others as they are; so is the gradient."""
    qkv = torch.randn(3, 2, 4 * 8, dtype=torch.float64, requires_grad=True)
    angle = torch.rand(3, 1, 1, 2, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    x = qkv.view(3, 2, 4, 8)
    a, b, rest = x.split([2, 2, 4], -1)
    want = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    want = torch.cat([want[:, :, :3], x[:, :, 3:]], 2)  # values are not rotated
    got = torch.cat(apply_rope(qkv, cos, sin, 2, 1, rotary=4), 2)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    dy = torch.randn_like(got)
    (dx,) = torch.autograd.grad(got, qkv, dy)
    torch.testing.assert_close(dx, torch.autograd.grad(want, qkv, dy)[0], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_zero_centered_norm_multiplies_by_one_and_the_weight(kind):
    class Centered(ResidualRMSNorm):
        zero_centered = True

    accumulate = torch.float64 if kind == torch.float64 else torch.float32
    x = torch.randn(3, 2, 8).to(kind).requires_grad_()
    grads = []
    for norm, start in ((Centered, 0.3), (ResidualRMSNorm, 1.3)):
        ctx = LayerContext(dtype=kind, accumulate=accumulate)
        ctx.sink.dtype = accumulate
        layer = norm(8, ctx=ctx)
        torch.nn.init.constant_(layer.weight, start)
        y, h = layer(x)
        (dx,) = torch.autograd.grad(y.square().sum() + h.sum(), x)
        grads.append((y.double(), dx.double(), ctx.sink.main_grad(layer.weight).double()))
    bound = 1e-12 if kind == torch.float64 else 2e-2
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= bound * b.norm()
    if kind == torch.bfloat16:  # 1 + w is not rounded to bf16
        ctx = LayerContext(dtype=kind)
        layer = Centered(8, ctx=ctx)
        torch.nn.init.constant_(layer.weight, 2.0**-10)
        assert layer.factor(layer.weight)[0] == 1 + 2.0**-10
    with pytest.raises(ValueError, match="--norm-backend apex: .* multiplies by 1 \\+ w"):
        Centered(8, ctx=LayerContext(norm_backend="apex"))
