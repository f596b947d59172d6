# SPDX-License-Identifier: Apache-2.0
"""Documents, windows and cached tokens on a GPU against the CPU; `make gpu-check` runs it."""

import pytest
import torch
from torch import Tensor

from mpu.layers.attention.backends import card_of, why_no_cudnn
from mpu.layers.attention.block_attention import (
    accumulate_dtype,
    attend_backward,
    block_attention,
    outputs,
)
from mpu.layers.attention.block_attention import attend as attend_blocks
from mpu.layers.attention.blocks import blocks
from mpu.layers.attention.core import CoreAttention
from mpu.layers.packed_seq_params import PackedSeqParams

pytestmark = pytest.mark.gpu
LENGTHS = [200, 1, 55, 1, 1, 254]
ERRORS = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def attend(
    x: Tensor, dy: Tensor, packed: PackedSeqParams | None, window: int, new: int
) -> tuple[Tensor, Tensor]:
    """Return the output of the last `new` tokens and the gradient: x [b, a + 2 g, s, d]."""
    x = x.detach().requires_grad_()
    q, k, v = x.split([8, 2, 2], 1)
    y = block_attention(q[:, :, -new:], k, v, packed, window)
    return y.detach(), torch.autograd.grad(y, x, dy[:, :, -new:])[0]


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("d", [64, 128, 20])
@pytest.mark.parametrize(
    "documents, window, new", [(True, 0, 512), (True, 100, 512), (False, 100, 512), (False, 0, 9)]
)
def test_as_on_the_cpu(dtype, d, documents, window, new, device):
    torch.manual_seed(0)
    x = torch.randn(1 if documents else 2, 12, 512, d).to(dtype)
    dy = torch.randn(len(x), 8, 512, d).to(dtype)
    packed = PackedSeqParams.of(LENGTHS) if documents else None
    want = attend(x.double(), dy.double(), packed, window, new)
    moved = packed and packed.to(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    got = attend(x.to(device), dy.to(device), moved, window, new)
    for mine, wanted in zip(got, want, strict=True):
        assert mine.dtype == dtype
        assert (mine.cpu().double() - wanted).norm() < ERRORS[dtype] * wanted.norm()


def test_the_memory_of_documents_is_not_a_square():
    """16,384 tokens in bf16: a bias of s x s alone would be 512 MiB."""
    s = 16384
    x = torch.randn(1, 12, s, 64, dtype=torch.bfloat16, device="cuda")
    packed = PackedSeqParams.of([5000, 1, s - 5001]).to("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    attend(x, torch.ones_like(x[:, :8]), packed, 0, s)
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20


def on_rows(asked: str, qkv: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of whole rows and the gradient: qkv [s, b, n, d], 8 heads in 2 groups."""
    x = qkv.detach().requires_grad_()
    y = CoreAttention(asked).attend(*x.split([8, 2, 2], 2), None, None, 0)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


@pytest.mark.parametrize("asked", ["auto", "flash", "fused", "unfused"])
def test_rows_by_each_backend(asked, device):
    if device == "cpu" and asked in ("flash", "fused"):
        pytest.skip("a CPU has no such kernel")
    if asked == "fused" and (why := why_no_cudnn(card_of(device), torch.bfloat16, 128)):
        pytest.skip(why)
    torch.manual_seed(0)
    x, dy = torch.randn(512, 2, 12, 128).bfloat16(), torch.randn(512, 2, 8 * 128).bfloat16()
    want = on_rows("auto", x.double(), dy.double())
    for mine, wanted in zip(on_rows(asked, x.to(device), dy.to(device)), want, strict=True):
        assert (mine.cpu().double() - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "math"])
def test_blocks_are_merged_by_each_kernels_log_sum_exp(kernel):
    """Queries of the second half look at all keys, as a rank of context parallelism does."""
    if kernel == "cudnn" and (why := why_no_cudnn(card_of("cuda"), torch.bfloat16, 128)):
        pytest.skip(why)
    torch.manual_seed(0)
    x, dy = torch.randn(1, 12, 1024, 128).bfloat16(), torch.randn(1, 8, 512, 128).bfloat16()
    found = []
    for each, how in ((x.double(), "cpu"), (x.cuda(), kernel)):
        q, k, v = (part.contiguous() for part in each.split([8, 2, 2], 1))
        q, pull = q[:, :, 512:], dy.to(each)
        todo = blocks(range(512, 1024), (1024,))
        out, lse = outputs(q, v, accumulate_dtype(q))
        sums = [torch.zeros_like(y, dtype=accumulate_dtype(q)) for y in (q, k, v)]
        attend_blocks(todo, q, k, v, out, lse, kernel=how, before=512)
        saved = (q, k, v, out.to(q.dtype), lse)
        attend_backward(todo, pull, saved, tuple(sums), how, before=512)
        found.append([out, *sums])
    for mine, wanted in zip(found[1], found[0], strict=True):
        assert (mine.cpu().double() - wanted).norm() < 1e-2 * wanted.norm()
