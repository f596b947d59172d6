# SPDX-License-Identifier: Apache-2.0
"""What stands in for torch on meta tensors answers as torch does, only sooner."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mpu.meta_tensors import (
    META,
    MetaOperations,
)
from mpu.torch_private import cpu_attention


def tensor(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


X, Y, ROW = tensor(6, 2, 8), tensor(6, 2, 8, dtype=torch.bfloat16), tensor(8)
COLUMN, TURNED = tensor(6, 2, 1), tensor(8, 2, 6).transpose(0, 2)
NUMBERS = tensor(3, 5, dtype=torch.long)
QKV = [tensor(2, 9, n, 8).transpose(1, 2) for n in (4, 2, 2)]
OPERATIONS = {
    "row": lambda: X * ROW,
    "mixed dtypes": lambda: X + Y,
    "narrow times a number": lambda: Y * 2.5,
    "two broadcast": lambda: COLUMN * ROW,
    "turned": lambda: TURNED.exp(),
    "in place": lambda: X.clone().mul_(COLUMN).add_(1.0),
    "addcmul": lambda: torch.addcmul(X, X, ROW),
    "comparison": lambda: (NUMBERS >= 2) & (NUMBERS < 4),
    "numbers": lambda: NUMBERS - 1,
    "division": lambda: X / 3,
    "masked": lambda: X.masked_fill(X > 0, 0.0),
    "where": lambda: torch.where(X > 0, X, 0.0),
    "norm": lambda: torch.linalg.vector_norm(X, dim=-1, keepdim=True),
    "sum": lambda: X.sum(0),
    "sum of all": lambda: X.sum(),
    "sum of numbers": lambda: NUMBERS.sum(-1),
    "sum in another dtype": lambda: Y.sum((0, 1), dtype=torch.float32),
    "mean": lambda: X.mean(-1, keepdim=True),
    "largest": lambda: X.amax(-1),
    "like": lambda: torch.zeros_like(TURNED),
    "like in another dtype": lambda: torch.empty_like(X, dtype=torch.bfloat16),
    "like a part": lambda: torch.empty_like(TURNED[:, :, 2:5]),
    "like a part of rows": lambda: torch.zeros_like(X[..., :3].transpose(0, 1)),
    "floor of a division": lambda: NUMBERS // 2,
    "product": lambda: torch.mm(tensor(3, 4), tensor(4, 5)),
    "products": lambda: torch.bmm(tensor(2, 3, 4), tensor(2, 4, 5)),
    "sum and product": lambda: torch.addmm(tensor(5), tensor(3, 4), tensor(4, 5)),
    "linear": lambda: F.linear(X, tensor(3, 8)),
    "look-up": lambda: F.embedding(NUMBERS, tensor(9, 4)),
    "gather": lambda: tensor(3, 7).gather(-1, NUMBERS),
    "rows and columns": lambda: X[NUMBERS, NUMBERS],
    "matrix and vector": lambda: torch.mv(tensor(3, 4), tensor(4)),
    "one behind the other": lambda: torch.cat([X, Y], -1),
    "three as one": lambda: torch.stack([ROW, ROW, ROW], -1),
    "count": lambda: torch.arange(2, 9, 3, device=META),
    "silu": lambda: F.silu(Y),
    "softmax": lambda: X.softmax(-1),
    "turned round": lambda: TURNED.flip(1),
    "a block of attention": lambda: cpu_attention(*QKV, True)[0],
    "its log-sum-exp": lambda: cpu_attention(*QKV, False)[1],
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_is_answered_as_by_torch(operation):
    with MetaOperations():
        found = operation()
    wanted = operation()
    assert found.is_meta and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.stride() == wanted.stride()


MISFITS = {
    "sum": lambda: X + tensor(5, 2, 8),
    "matrices": lambda: torch.mm(tensor(3, 4), tensor(5, 4)),
    "batches": lambda: torch.bmm(tensor(2, 3, 4), tensor(3, 4, 5)),
    "linear": lambda: F.linear(X, tensor(3, 9)),
    "one behind the other": lambda: torch.cat([X, X[:5]], -1),
    "stacked": lambda: torch.stack([X, X[:5]]),
}


@pytest.mark.parametrize("operation", MISFITS.values(), ids=MISFITS)
def test_shapes_that_do_not_fit_are_an_error_as_in_torch(operation):
    with pytest.raises(RuntimeError):
        operation()
    with MetaOperations(), pytest.raises(RuntimeError):
        operation()


def test_in_place_is_the_same_memory():
    with MetaOperations():
        out = tensor(4)
        assert out.mul_(2.0) is out and torch.mul(out, 2.0, out=out) is out


def test_attention_keeps_no_square():
    q, k = tensor(2, 4, 64, 8).requires_grad_(), tensor(2, 2, 64, 8).requires_grad_()
    kept = []
    hooks = (lambda t: kept.append(t.shape) or t, lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        y = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    y.sum().backward()
    assert y.shape == q.shape and q.grad.shape == q.shape and k.grad.shape == k.shape
    assert sorted(map(len, kept)) == [3, 4, 4, 4, 4] and (2, 4, 64) in kept


@pytest.mark.prove
def test_flops_need_no_symbolic_algebra():
    """Torch imports one for its own answers: a second, and more, at the start of every run."""
    code = (
        "import sys; from tests.training.small_llama import read; "
        "from pretrain_llama import model_provider; "
        "from training.run.model_profile import model_profile; "
        "assert model_profile(read(), model_provider).flops; print('sympy' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
