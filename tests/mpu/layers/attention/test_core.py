# SPDX-License-Identifier: Apache-2.0
"""Rotary positions and attention against formulas; documents in one row do not see each other."""

import pytest
import torch
from torch.autograd import gradcheck

from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.layers.attention.core import core_attention
from mpu.layers.fused import RMSNorm, apply_rope, swiglu
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.layers.rope import rope_frequencies, rope_table


def table(length: int, d: int, dtype: torch.dtype = torch.float64):
    return rope_table(rope_frequencies(d, 100.0), length, dtype, torch.device("cpu"))


def test_rope_turns_by_an_angle_that_grows_with_position():
    cos, sin = table(5, 4)
    x = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    y = torch.cat(apply_rope(x.flatten(2), cos, sin, 1, 1), 2)
    assert torch.equal(y[:, :, 2], x[:, :, 2]), "the value head turned"
    for pos in range(5):
        for pair, frequency in enumerate((1.0, 0.1)):
            a = torch.complex(x[pos, :, :2, pair], x[pos, :, :2, pair + 2])
            b = torch.complex(y[pos, :, :2, pair], y[pos, :, :2, pair + 2])
            turn = torch.polar(torch.tensor(1.0).double(), torch.tensor(pos * frequency).double())
            torch.testing.assert_close(b, a * turn)


@pytest.mark.parametrize("factor, original", [(8.0, 8192), (32.0, 8192), (8.0, 64)])
def test_stretched_frequencies_equal_hugging_face(factor, original):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": original,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, max_position_embeddings=131072,
                         rope_theta=5e5, rope_scaling=rope)  # fmt: skip
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    got = rope_frequencies(128, 5e5, factor, original)
    torch.testing.assert_close(got.float(), want.float(), rtol=1e-6, atol=0)


def test_gradients_by_finite_differences():
    torch.manual_seed(3)
    cos, sin = table(4, 4)
    x = torch.randn(4, 2, 16, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: apply_rope(x, cos, sin, 2, 1), x)
    gate_up = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    assert gradcheck(swiglu, gate_up)
    qkv = torch.randn(4, 2, 16, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: core_attention(x, cos, sin, 2, 1, None), qkv)


def test_rms_norm_and_its_weight_gradient():
    sink = GradientSink(torch.float64)
    ctx = LayerContext(dtype=torch.float64, accumulate=torch.float64, sink=sink)
    norm = RMSNorm(6, ctx=ctx, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6))
    x = torch.randn(5, 2, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 2, 6, dtype=torch.float64)
    norm(x).backward(dy)
    y, w = x.detach().requires_grad_(), norm.weight.detach().clone().requires_grad_()
    (y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w).backward(dy)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ctx.sink.main[norm.weight], w.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_elementwise_is_no_worse_than_rounding(dtype):
    """Against fp64 on the same inputs: the error of one or two roundings."""
    eps = torch.finfo(dtype).eps
    ctx = LayerContext(dtype=dtype)
    norm = RMSNorm(64, ctx=ctx)
    torch.nn.init.ones_(norm.weight)
    x = torch.randn(9, 2, 64).to(dtype)
    y = x.double()
    want = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (norm(x).double() - want).norm() <= 2 * eps * want.norm()
    cos, sin = table(9, 32, torch.float32)
    exact_cos, exact_sin = table(9, 32)
    want = apply_rope(y.repeat(1, 1, 2), exact_cos, exact_sin, 2, 1)[0]
    got = apply_rope(x.repeat(1, 1, 2), cos, sin, 2, 1)[0]
    assert got.dtype == dtype and (got.double() - want).norm() <= 2 * eps * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_does_not_see_another(dtype):
    """Change a token of row 0's first document: all other documents' outputs keep every bit."""
    s, cut, d = 12, 5, 8
    cos, sin = table(s, d, torch.float32)
    packed = PackedSeqParams.of([cut, s - cut] * 2)
    qkv = torch.randn(s, 2, 4 * d).to(dtype)
    before = core_attention(qkv, cos, sin, 2, 1, packed)
    changed = qkv.clone()
    changed[2, 0] += 1.0
    after = core_attention(changed, cos, sin, 2, 1, packed)
    assert torch.equal(before[cut:], after[cut:]) and torch.equal(before[:, 1], after[:, 1])
    assert not torch.equal(before[2:cut, 0], after[2:cut, 0])
    alone = core_attention(qkv[:cut], cos[:cut], sin[:cut], 2, 1, None)
    error = (before[:cut] - alone).double().norm()  # another kernel may compute these
    assert error <= 2 * torch.finfo(dtype).eps * alone.double().norm()


@pytest.mark.parametrize("window", [0, 1, 4, 50])
@pytest.mark.parametrize("cuts", [[12], [5, 12], list(range(1, 13))])
def test_a_cache_and_a_window_give_what_one_dense_mask_gives(window, cuts):
    """Token by token, in two parts or at once; a query sees the `window` last tokens, or all."""
    s, d, heads, groups = 12, 8, 4, 2
    cos, sin = table(s, d)
    qkv = torch.randn(s, 3, (heads + 2 * groups) * d, dtype=torch.float64)
    back = torch.arange(s)[:, None] - torch.arange(s)
    mask = (back >= 0) & (back < (window or s))
    q, k, v = apply_rope(qkv, cos, sin, heads, groups)
    k, v = (x.repeat_interleave(heads // groups, 2) for x in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) / d**0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    want = torch.einsum("bnij,jbnd->ibnd", weights, v).flatten(2)
    cache, got, first = [], [], 0
    for last in cuts:
        at = slice(first, last)
        part = (qkv[at], cos[at], sin[at], heads, groups, None)
        got.append(core_attention(*part, cache=cache, window=window))
        first = last
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-12, atol=1e-14)
    whole = core_attention(qkv, cos, sin, heads, groups, None, window=window)
    torch.testing.assert_close(whole, want, rtol=1e-12, atol=1e-14)
