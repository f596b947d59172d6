# SPDX-License-Identifier: Apache-2.0
"""--norm-backend and --attention-backend te against small imitations of apex and of Transformer
Engine, whose functions take and return what those of the packages do.

Signatures are those of apex at 6424da3b (2026-07, csrc/layer_norm_cuda.cpp) and of Transformer
Engine 2.20.0.dev0 at d0067d0da (2026-08, pytorch/csrc/extensions/pybind.cpp,
dot_product_attention.py). The imitations refuse arguments that the packages do not take. The
kernels themselves have not run here.
"""

import sys
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mpu.accelerators import missing
from mpu.context import LayerContext
from mpu.gradients import GradientSink
from mpu.layers import fused
from mpu.layers.attention.core import core_attention
from mpu.layers.context_attention import core_attention_of
from mpu.layers.fused import ResidualRMSNorm, RMSNorm
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.layers.rope import rope_frequencies, rope_table

H, EPS = 12, 1e-3


def rms_forward(x, w, eps):
    assert x.dim() == 2 and x.is_contiguous() and w.shape == x.shape[1:] and w.dtype == x.dtype
    r = (x.float().square().mean(1) + eps).rsqrt()
    return (x.float() * r[:, None] * w.float()).to(x.dtype), r


def rms_backward(dy, x, r, w):
    assert dy.shape == x.shape and dy.is_contiguous() and r.shape == x.shape[:1]
    wide, p = x.float(), dy.float() * w.float()
    dx = p * r[:, None] - wide * (r**3 / x.shape[1] * (p * wide).sum(1))[:, None]
    return dx.to(x.dtype), (dy.float() * wide * r[:, None]).sum(0).to(w.dtype)


def rms_forward_affine(input, normalized_shape, weight, eps):
    assert normalized_shape == tuple(weight.shape)
    return list(rms_forward(input, weight, eps))


def rms_backward_affine(dout, invvar, input, normalized_shape, gamma, epsilon, memory_efficient):
    assert normalized_shape == tuple(gamma.shape) and epsilon == EPS and not memory_efficient
    return list(rms_backward(dout, input, invvar, gamma))


class DType(IntEnum):
    kFloat32, kBFloat16 = 4, 6


TE_DTYPE = {torch.float32: DType.kFloat32, torch.bfloat16: DType.kBFloat16}


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    assert (ln_out, quantizer, sm_margin, zero_centered_gamma) == (None, None, 0, False)
    assert otype is TE_DTYPE[input.dtype]
    y, r = rms_forward(input, weight, eps)
    return [y, None, r]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma, /):
    assert (sm_margin, zero_centered_gamma) == (0, False)
    return list(rms_backward(dz, x, rsigma, gamma))


class DotProductAttention(torch.nn.Module):
    """Takes sbhd, or thd with cu_seqlens; each token sees its document, and its window of it."""

    def __init__(self, num_attention_heads: int, kv_channels: int | tuple[int, int],
                 num_gqa_groups: int | None = None, attention_dropout: float = 0.0,
                 qkv_format: str = "sbhd", attn_mask_type: str = "causal") -> None:  # fmt: skip
        super().__init__()
        both = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.sizes, self.qkv_format = (num_attention_heads, *both, num_gqa_groups), qkv_format
        assert attention_dropout == 0.0 and attn_mask_type == "causal"

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None,
                cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
                cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
                attn_mask_type=None, window_size=None):  # fmt: skip
        heads, size, of_values, groups = self.sizes
        assert query_layer.shape[-2:] == (heads, size) and key_layer.shape[-2:] == (groups, size)
        assert value_layer.shape[-2:] == (groups, of_values)
        q, k, v = query_layer, key_layer, value_layer
        if (qkv_format or self.qkv_format) == "thd":
            assert attn_mask_type == "padding_causal" and q.dim() == 3
            assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_kv)
            lengths = cu_seqlens_q.diff().tolist()
            assert max_seqlen_q == max_seqlen_kv == max(lengths)
            q, k, v = (x[:, None] for x in (q, k, v))
        else:
            assert attn_mask_type == "causal" and q.dim() == 4 and cu_seqlens_q is None
            lengths = [len(q)]
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        at = torch.arange(len(number))
        back = at[:, None] - at
        look = (number[:, None] == number) & (back >= 0)
        left, right = window_size
        look = look & (back <= left) if left >= 0 else look
        assert right == 0
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=look, enable_gqa=True)
        y = y.permute(2, 0, 1, 3).flatten(2)
        return y if query_layer.dim() == 4 else y[:, 0]


@pytest.fixture
def packages(monkeypatch):
    """Put the imitations where `import` finds them; keep csrc/fused.cpp away from CPU tensors."""

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    module("fused_layer_norm_cuda", rms_forward_affine=rms_forward_affine,
           rms_backward_affine=rms_backward_affine)  # fmt: skip
    module("transformer_engine")
    module("transformer_engine.pytorch", DotProductAttention=DotProductAttention)
    module("transformer_engine.pytorch.constants", TE_DType=TE_DTYPE)
    module("transformer_engine_torch", rmsnorm_fwd=rmsnorm_fwd, rmsnorm_bwd=rmsnorm_bwd)
    monkeypatch.setattr(fused, "fits", lambda *tensors, accumulate=None: False)


def normed(backend: str, dtype: torch.dtype, kind: type, branch: bool) -> list[torch.Tensor]:
    """Return what a norm gives: outputs, the gradients of its inputs, that of its weight."""
    ctx = LayerContext(dtype=dtype, sink=GradientSink(), norm_backend=backend)
    layer, g = kind(H, ctx=ctx, eps=EPS), torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(H, generator=g))
    shape = (5, 3, H)
    given = [torch.randn(shape, generator=g).to(dtype).requires_grad_() for _ in range(1 + branch)]
    out = layer(*given)
    out = out if isinstance(out, tuple) else (out,)
    ups = [torch.randn(shape, generator=g).to(dtype) for _ in out]
    for _ in range(2):  # two micro-batches add up
        torch.autograd.backward(out, ups, retain_graph=True)
    return [*out, *(x.grad for x in given), ctx.sink.main_grad(layer.weight)]


@pytest.mark.parametrize("backend", ["apex", "te"])
@pytest.mark.parametrize(
    "dtype, kind, branch",
    [
        (torch.float32, RMSNorm, False), (torch.bfloat16, ResidualRMSNorm, False),
        (torch.float32, ResidualRMSNorm, True),
    ],
)  # fmt: skip
def test_a_norm_is_that_of_weft(packages, backend, dtype, kind, branch):
    own, theirs = (normed(name, dtype, kind, branch) for name in ("weft", backend))
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=5e-2)
    for mine, other in zip(own, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(other, mine, **close)
    assert theirs[-1].dtype == torch.float32, "the main gradient stays wide"


@pytest.mark.parametrize("backend", ["weft", "apex", "te"])
def test_a_frozen_norm_adds_no_gradient_of_its_weight(packages, backend):
    ctx = LayerContext(sink=GradientSink(), norm_backend=backend)
    layer = RMSNorm(H, ctx=ctx, eps=EPS).requires_grad_(False)
    x = torch.randn(5, 3, H, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and not ctx.sink.written


@pytest.mark.parametrize(
    "documents, window, heads, groups",
    [(None, 0, 4, 4), (None, 3, 3, 1), ((7, 1, 6, 5, 9), 0, 4, 2), ((7, 1, 6, 5, 9), 3, 4, 4)],
)
def test_attention_is_that_of_torch(packages, documents, window, heads, groups):
    s, b, d = 14, 2, 8
    packed = None if documents is None else PackedSeqParams.of(documents)
    cos, sin = rope_table(rope_frequencies(d, 1e4), s, torch.float32, torch.device("cpu"))
    g = torch.Generator().manual_seed(2)
    x = torch.randn(s, b, (heads + 2 * groups) * d, generator=g)
    up = torch.randn(s, b, heads * d, generator=g)
    found = []
    ours, te = LayerContext(), LayerContext(attention_backend="te")
    for attend in (core_attention_of(ours), core_attention_of(te), core_attention_of(te)):
        qkv = x.clone().requires_grad_()
        y = attend(qkv, cos, sin, heads, groups, packed, window=window)
        y.backward(up)
        found.append((y.detach(), qkv.grad))
    assert type(core_attention_of(ours)) is type(core_attention)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("documents", [None, (5, 9)])
def test_values_have_a_size_of_their_own_and_sinks_are_refused(packages, documents):
    packed = None if documents is None else PackedSeqParams.of(documents)
    q, k, v = (torch.randn(14, 1, n, d) for n, d in ((4, 12), (2, 12), (2, 8)))
    te = core_attention_of(LayerContext(attention_backend="te"))
    want = core_attention.attend(q, k, v, packed, scale=0.4)
    got = te.attend(q, k, v, packed, scale=0.4)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="^--attention-backend te: attention sinks are not"):
        te.attend(q, k, v, packed, sink=torch.zeros(4))


def test_text_is_generated_by_torch(packages):
    """With a cache queries and keys differ in number, for which core_attention is there."""
    attend, cache = core_attention_of(LayerContext(attention_backend="te")), []
    cos, sin = rope_table(rope_frequencies(8, 1e4), 4, torch.float32, torch.device("cpu"))
    qkv = torch.randn(4, 1, 3 * 8)
    whole = core_attention(qkv.clone(), cos, sin, 1, 1, None)
    parts = [
        attend(qkv[i : i + 1].clone(), cos[i : i + 1], sin[i : i + 1], 1, 1, None, cache=cache)
        for i in range(4)
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_says_what_is_missing(packages, monkeypatch):
    wide, narrow = torch.float64, torch.bfloat16
    assert missing("--norm-backend", "weft", "cpu", wide) == ""
    assert missing("--attention-backend", "auto", "cpu", wide) == ""
    for flag, name, own in (
        ("--norm-backend", "apex", "weft"),
        ("--norm-backend", "te", "weft"),
        ("--attention-backend", "te", "auto"),
    ):
        assert missing(flag, name, "cuda", narrow) == ""
        assert missing(flag, name, "cpu", narrow) == (
            f"{flag} {name} has CUDA kernels only: use {flag} {own} on cpu"
        )
        assert missing(flag, name, "cuda", wide) == f"{flag} {name} has no fp64: use {flag} {own}"
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)  # import fails
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    said = missing("--norm-backend", "apex", "cuda", narrow)
    assert said.startswith("--norm-backend apex needs NVIDIA apex, built with its CUDA extensions,")
    assert said.endswith("install it or use --norm-backend weft") and "ModuleNotFound" in said
    said = missing("--attention-backend", "te", "cuda", narrow)
    assert said.startswith("--attention-backend te needs Transformer Engine which cannot be")
