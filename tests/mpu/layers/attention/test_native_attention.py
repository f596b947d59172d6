# SPDX-License-Identifier: Apache-2.0
"""csrc/attention.h against its twin, torch's scaled_dot_product_attention in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpu import native
from mpu.layers.attention import core as attention

# of the norm of the twin's result, in units in the last place of the dtype
FORWARD = {torch.float64: 24, torch.float32: 12, torch.bfloat16: 0.5}
BACKWARD = {torch.float64: 96, torch.float32: 48, torch.bfloat16: 1}
SHAPES = [  # s, b, a, g, d: one token, tails of queries, keys, vectors and rows of four, each alone
    (1, 1, 1, 1, 1), (5, 2, 3, 1, 7), (37, 1, 2, 2, 20), (64, 2, 4, 2, 32), (66, 1, 1, 1, 16),
    (100, 1, 2, 1, 64), (130, 1, 3, 3, 80), (200, 1, 2, 1, 129),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _built():
    if native.load() is None:
        pytest.skip(native.reason())


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return qkv [s, b, a + 2 g, d] and dy [s, b, a d]: the same numbers in every dtype."""
    s, b, a, g, d = shape
    torch.manual_seed(s)
    qkv, dy = 2 * torch.randn(s, b, a + 2 * g, d), torch.randn(s, b, a * d)
    return qkv.bfloat16().to(dtype), dy.bfloat16().to(dtype)


def ours(qkv: Tensor, dy: Tensor, a: int, g: int) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of qkv."""
    qkv = qkv.detach().requires_grad_()
    y = attention.CausalAttention.apply(*qkv.split((a, g, g), 2))
    return y.detach(), torch.autograd.grad(y, qkv, dy)[0]


def twin(qkv: Tensor, dy: Tensor, a: int, g: int) -> tuple[Tensor, Tensor]:
    qkv = qkv.detach().requires_grad_()
    q, k, v = (x.permute(1, 2, 0, 3) for x in qkv.split((a, g, g), 2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=a != g)
    y = y.permute(2, 0, 1, 3).flatten(2)
    return y.detach(), torch.autograd.grad(y, qkv, dy)[0]


@pytest.mark.parametrize("dtype", FORWARD, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_its_twin(shape, dtype):
    a, g = shape[2:4]
    got = ours(*draw(shape, dtype), a, g)
    want = twin(*draw(shape, torch.float64), a, g)
    for x, y, most in zip(got, want, (FORWARD, BACKWARD), strict=True):
        error = (x.double() - y).norm() / torch.finfo(dtype).eps
        assert error <= most[dtype] * y.norm(), f"{error / y.norm():.2f} units in the last place"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(dtype, threads):
    qkv, dy = draw((70, 2, 6, 3, 24), dtype)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(ours(qkv, dy, 6, 3))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_does_not_see_later_tokens(dtype):
    """Change tokens from 41 on: earlier outputs and gradients, to the bit, and no gradient to them
    from earlier outputs.
    """
    qkv, dy = draw((90, 2, 4, 2, 16), dtype)
    dy[41:] = 0
    later = qkv.clone()
    later[41:] *= -3
    (y, grad), (y_later, grad_later) = (ours(x, dy, 4, 2) for x in (qkv, later))
    assert torch.equal(y[:41], y_later[:41]) and not torch.equal(y[41:], y_later[41:])
    assert torch.equal(grad[:41], grad_later[:41]) and grad[:41].any()
    assert not grad[41:].any()


def test_large_scores_stay_finite_and_a_not_a_number_stays_one():
    qkv, dy = draw((80, 1, 2, 1, 16), torch.float32)
    large = qkv.clone()
    large[:, :, :3] *= 100  # q and k: scores of some 10^5
    got, want = ours(large, dy, 2, 1), twin(large.double(), dy.double(), 2, 1)
    for x, y in zip(got, want, strict=True):
        assert torch.isfinite(x).all()
        assert (x.double() - y).norm() <= 0.02 * y.norm()  # a score is good to 2^-7 only
    qkv[70, 0, 2] = torch.nan  # a key
    y, grad = ours(qkv, dy, 2, 1)
    assert torch.isfinite(y[:70]).all() and y[70:].isnan().all() and grad[70:].isnan().any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slices_of_features_are_taken_as_slices_of_heads_are(shape, monkeypatch):
    """Micro-batches of one row, one key/value head: a stride there is of a single element."""
    monkeypatch.setattr(attention, "attention_is_fast", lambda q, units: True)
    (_, _, a, g, d), (qkv, dy) = shape, draw(shape, torch.float32)
    flat = qkv.flatten(2)  # what an exchange of heads has sent
    parts = flat.split([a * d, g * d, g * d], 2)
    parts = [part.unflatten(2, (-1, d)) for part in parts]
    assert attention.takes_native(*parts) and attention.takes_native(*qkv.split((a, g, g), 2))
    assert torch.equal(attention.CausalAttention.apply(*parts), ours(qkv, dy, a, g)[0])
    apart = parts[0].contiguous()  # rows that lie elsewhere than those of keys and values
    assert attention.takes_native(apart, *parts[1:]) == (shape[:2] == (1, 1))
