# SPDX-License-Identifier: Apache-2.0
"""Attention over documents and windows against a dense mask: values and every gradient.

torch's flash operator for CUDA has no CPU kernel; what Weft passes to it is held against what its
documentation says of the arguments, by a stand-in.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mpu import torch_private
from mpu.layers.attention import block_attention as module
from mpu.layers.attention.block_attention import (
    block_attention,
    products_backward,
    products_forward,
)
from mpu.layers.attention.blocks import blocks
from mpu.layers.attention.core import core_attention
from mpu.layers.packed_seq_params import PackedSeqParams

aten = torch.ops.aten
DOCUMENTS = {  # of each row
    "one": [[13], [13]],
    "many": [[5, 1, 7], [1, 1, 2, 9]],
    "single tokens": [[1] * 13, [12, 1]],
}


def dense(q: Tensor, k: Tensor, v: Tensor, look: Tensor) -> Tensor:
    """Return attention under a mask: q [b, a, s, d], k and v [b, g, S, d], look bool [b, s, S]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    return scores.masked_fill(~look[:, None], -torch.inf).softmax(-1) @ v


def looks(rows: list[list[int]], window: int = 0) -> Tensor:
    """Return bool [b, s, s] of rows of documents."""
    s = sum(rows[0])
    back = torch.arange(s)[:, None] - torch.arange(s)
    ids = torch.stack([torch.arange(len(r)).repeat_interleave(torch.tensor(r)) for r in rows])
    return (ids[:, :, None] == ids[:, None]) & (back >= 0) & (back < (window or s))


def pack(rows: list[list[int]]) -> PackedSeqParams:
    return PackedSeqParams.of([length for row in rows for length in row])


def no_turn(s: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.ones(s, 1, 1, d // 2, dtype=dtype), torch.zeros(s, 1, 1, d // 2, dtype=dtype)


@pytest.mark.parametrize("window, groups", [(0, 1), (0, 4), (1, 2), (4, 1), (50, 2)])
@pytest.mark.parametrize("rows", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("kernel", ["csrc", "torch"])
def test_documents_give_what_a_dense_mask_gives(monkeypatch, rows, window, groups, kernel):
    if kernel == "torch":
        monkeypatch.setattr(module, "_native_takes", lambda *x: False)
    torch.manual_seed(0)
    s, b, heads, d = 13, 2, 4, 8
    qkv = torch.randn(s, b, (heads + 2 * groups) * d, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(s, b, heads * d, dtype=torch.float64)
    turn = no_turn(s, d, torch.float64)
    got = core_attention(qkv, *turn, heads, groups, pack(rows), window=window)
    (grad,) = torch.autograd.grad(got, qkv, dy)
    x = qkv.view(s, b, heads + 2 * groups, d).permute(1, 2, 0, 3)
    want = dense(*x.split([heads, groups, groups], dim=1), looks(rows, window))
    want = want.permute(2, 0, 1, 3).flatten(2)
    (want_grad,) = torch.autograd.grad(want, qkv, dy)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert (grad - want_grad).abs().max() < 1e-12 * want_grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("s, keys, part", [(37, 70, "all"), (64, 64, "all"), (70, 70, "tril")])
def test_blocks_of_csrc_do_what_matrix_products_do(s, keys, part, dtype):
    """Of slices of longer rows, with a log-sum-exp that counts other keys too."""
    torch.manual_seed(0)
    q, y, dy = torch.randn(3, 2, 6, s + 5, 20).to(dtype)[:, :, :, 3 : s + 3]
    k, v = torch.randn(keys + 4, 2, 6, 20).to(dtype)[2 : keys + 2].permute(1, 2, 0, 3).chunk(2, 1)
    if not module._native_takes(q, k, v):
        pytest.skip("csrc/attention.h is not built, or slow here")
    wide = [x.double() for x in (q, k, v)]
    out, lse = module._native_forward(q, k, v, part == "tril")
    want = products_forward(*wide, part == "tril")
    more = (want[1] + 0.5).to(module.accumulate_dtype(q))
    found = module._native_backward(dy, q, k, v, y, more, part == "tril")
    grads = products_backward(dy.double(), *wide, y.double(), want[1] + 0.5, part == "tril")
    limit = 40 * torch.finfo(dtype).eps
    for mine, twin in zip((out, lse, *found), (*want, *grads), strict=True):
        assert mine.shape == twin.shape and (mine - twin).norm() < limit * twin.norm()


@pytest.mark.parametrize("causal", [True, False])
def test_matrix_products_do_what_the_flash_operator_does(causal):
    """Forward, and backward with the output and log-sum-exp of a larger whole."""
    torch.manual_seed(0)
    q, dy, out = (torch.randn(2, 6, 7, 4, dtype=torch.float64) for _ in range(3))
    k, v = (torch.randn(2, 3, 7, 4, dtype=torch.float64) for _ in range(2))
    want = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    torch.testing.assert_close(products_forward(q, k, v, causal), want, rtol=1e-12, atol=1e-13)
    lse = want[1] + 0.5
    want = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, k, v, out, lse, 0.0, causal
    )
    got = products_backward(dy, q, k, v, out, lse, causal)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def flash_stand_in(
    q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    window_size_left: int | None, window_size_right: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Do as aten._flash_attention_forward: [b, s, n, d], or [s, n, d] cut by cumulative lengths.

    The last query and the last key stand at the same place. A window is (tokens before, after).
    """
    assert dropout_p == 0.0 and not return_debug_mask and cum_seq_q is cum_seq_k
    if cum_seq_q is not None:
        ends = cum_seq_q.tolist()
        assert cum_seq_q.dtype == torch.int32 and ends[-1] == len(q) == len(k)
        assert max_q == max_k == cum_seq_q.diff().max()
        parts = []
        for i, j in pairwise(ends):
            one = (x[None, i:j] for x in (q, k, v))
            parts += flash_stand_in(
                *one, None, None, j - i, j - i, dropout_p, is_causal, False,
                window_size_left=window_size_left, window_size_right=window_size_right,
            )[0]  # fmt: skip
        return (torch.cat(parts),)
    assert (q.shape[1], k.shape[1]) == (max_q, max_k)
    left = -1 if window_size_left is None else window_size_left
    right = 0 if is_causal else -1 if window_size_right is None else window_size_right
    ahead = torch.arange(max_k) - torch.arange(max_k)[max_k - max_q :, None]
    look = (right < 0) | (ahead <= right)
    look = look & ((left < 0) | (-ahead <= left))
    y = dense(*(x.transpose(1, 2) for x in (q, k, v)), look.expand(len(q), -1, -1))
    return (y.transpose(1, 2),)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("rows, new", [(None, 13), (None, 4), (DOCUMENTS["many"], 26)])
def test_the_call_on_cuda_means_the_same(monkeypatch, rows, new, window):
    monkeypatch.setattr(torch_private.aten, "_flash_attention_forward", flash_stand_in)
    packed, shape = (pack(rows), (1, 8, 26, 4)) if rows else (None, (2, 8, 13, 4))
    q, k, v = torch.randn(shape, dtype=torch.float64).split([4, 2, 2], 1)
    q = q[:, :, -new:]
    want = block_attention(q, k, v, packed, window)
    torch.testing.assert_close(module._flash_attention(q, k, v, packed, window), want)


def test_the_call_on_cuda_is_one_that_torch_knows():
    """The names of the arguments, and its own backward, on meta tensors."""
    x = torch.empty(1, 8, 26, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    for packed in (pack(DOCUMENTS["many"]).to("meta"), None):
        y = module._flash_attention(*x.split([4, 2, 2], 1), packed, 3)
        assert y.shape == (1, 4, 26, 8)
        (grad,) = torch.autograd.grad(y, x, torch.empty_like(y))
        assert grad.shape == x.shape


def test_documents_that_do_not_fill_the_batch_are_refused():
    x = torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match="the packed documents have 4 tokens, but the batch has 5"):
        block_attention(x, x, x, PackedSeqParams.of([1, 3]), 0)
    with pytest.raises(ValueError, match="each must be at least 1"):
        PackedSeqParams.of([2, 0])


def test_the_largest_document_and_the_ends_are_known_on_the_host():
    packed = PackedSeqParams.of([2, 5, 1]).to("meta")
    assert (packed.lengths, packed.max_seqlen) == ((2, 5, 1), 5)
    assert packed.cu_seqlens.device.type == "meta" and packed.cu_seqlens.dtype == torch.int32
    kept: Any = PackedSeqParams.of([2, 5, 1]).cu_seqlens.tolist()
    assert kept == [0, 2, 7, 8]


class ReadsByAddress:
    """Stand in for CUDA's flash operators: the log-sum-exp is read at its address as [b, a, s].

    torch makes out and grad_out contiguous and passes logsumexp on; the kernel reads row
    (b a + head) s + token of it (aten/src/ATen/native/transformers/cuda/attention_backward.cu and
    flash_attn/src/flash_bwd_kernel.h).
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(aten, name)

    @staticmethod
    def _scaled_dot_product_flash_attention(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool
    ) -> tuple[Tensor, ...]:
        return (*products_forward(q, k, v, is_causal), None)

    @staticmethod
    def _scaled_dot_product_flash_attention_backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, a, s, _ = q.shape
        assert lse.shape == (b, a, s)
        read = torch.as_strided(lse, (b, a, s), (a * s, s, 1))
        return products_backward(dy, q, k, v, out, read, causal=rest["is_causal"])

    @staticmethod
    def _scaled_dot_product_cudnn_attention(
        q: Tensor, k: Tensor, v: Tensor, attn_bias: None, compute_log_sumexp: bool, is_causal: bool
    ) -> tuple[Tensor, ...]:
        """The log-sum-exp is [b, a, s, 1]; a single key is refused (sdp_utils.cpp)."""
        assert k.shape[2] > 1 and attn_bias is None and compute_log_sumexp
        out, lse = products_forward(q, k, v, is_causal)
        return (out, lse[..., None], None)

    @staticmethod
    def _scaled_dot_product_cudnn_attention_backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A plan is cached by shapes and strides of q, k, v: the log-sum-exp's are taken for those
        of its first call (MHA.cpp), so here for contiguous ones.
        """
        b, a, s, _ = q.shape
        assert lse.shape == (b, a, s, 1) and k.shape[2] > 1
        assert (rest["max_q"], rest["max_k"]) == (s, k.shape[2])
        assert all(x.stride(3) == 1 for x in (dy, q, k, v, out))
        read = torch.as_strided(lse, (b, a, s), (a * s, s, 1))
        return products_backward(dy, q, k, v, out, read, causal=rest["is_causal"])


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("window", [0, 4])
def test_kernels_are_given_what_they_read_by_address(monkeypatch, window, kernel):
    """Blocks by CUDA's operators have the gradients of a dense mask (fp64)."""
    monkeypatch.setattr(torch_private, "aten", ReadsByAddress())
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, n, 13, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    dy, look = torch.randn_like(q), looks([[13]] * 2, window)
    want = torch.autograd.grad(dense(q, k, v, look), (q, k, v), dy)
    out = module._BlockAttention.apply(q, k, v, blocks(range(13), (13,), window), kernel)
    got = torch.autograd.grad(out, (q, k, v), dy)
    for mine, other in zip(got, want, strict=True):
        assert (mine - other).norm() <= 1e-12 * other.norm()
