# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel cross entropy against torch's, with logits scaled to attack its stability."""

import pytest
import torch
import torch.nn.functional as F

from mpu.context import LayerContext
from mpu.layers.cross_entropy import vocab_parallel_cross_entropy
from mpu.layers.linear import ColumnParallelLinear

S, B, V = 13, 11, 17


def case(scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(S, B, V, dtype=torch.float64, generator=g) * scale
    labels = torch.randint(0, V, (S, B), generator=g)
    return logits, labels, torch.rand(S, B, generator=g).double()


def parallel(comm, t: int, local: int, scale: float, dtype_name: str):
    """Cut the vocabulary into `local` columns a rank; what lies beyond V is poisoned padding."""
    dtype = getattr(torch, dtype_name)
    grid = comm.grid(t)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    ctx = LayerContext(grid, False, dtype, accumulate)
    logits, labels, weight = case(scale)
    padded = torch.full((S, B, local * t), 1e6, dtype=torch.float64)
    padded[..., :V] = logits
    mine = padded.chunk(t, -1)[grid.tp.rank].to(dtype).contiguous().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, labels, V, ctx)
    assert loss.dtype == accumulate
    (loss * weight).sum().backward()
    return loss.detach().numpy(), mine.grad.double().numpy()


@pytest.mark.parametrize(
    "size, t, local",
    [(1, 1, 17), (1, 1, 20), (2, 2, 9), (2, 2, 12), (4, 4, 5), (4, 4, 9), (2, 2, 17)],
)
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_equals_torch(world, size, t, local, scale):
    logits, labels, weight = case(scale)
    logits.requires_grad_()
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    (want * weight).sum().backward()
    for rank, (loss, grad) in enumerate(world(size).run(parallel, t, local, scale, "float64")):
        torch.testing.assert_close(torch.from_numpy(loss), want.detach(), rtol=1e-12, atol=1e-12)
        first = min((rank % t) * local, V)
        real = min(first + local, V) - first
        got = torch.from_numpy(grad)
        torch.testing.assert_close(
            got[..., :real], logits.grad[..., first : first + real], rtol=1e-10, atol=1e-13
        )
        assert not got[..., real:].any(), "padding has a gradient"


@pytest.mark.parametrize("end", ["tanh", "exp", "turned", "penalty first", "penalty last"])
def test_logits_that_something_else_saved_or_made_are_not_written_over(end):
    """A soft-cap whose result autograd keeps, another order in memory, a penalty on the logits."""
    ctx = LayerContext(dtype=torch.float64, accumulate=torch.float64)
    head = ColumnParallelLinear(6, V, ctx=ctx)
    torch.nn.init.normal_(head.weight)
    labels, x = case(1.0)[1], torch.randn(S, B, 6, dtype=torch.float64, requires_grad=True)
    ends = {"tanh": torch.tanh, "exp": lambda y: torch.exp(0.1 * y)}

    def total(linear, cross_entropy):
        y = linear(x)
        y = y.transpose(0, 1).contiguous().transpose(0, 1) if end == "turned" else y
        y = ends.get(end, lambda y: y)(y)
        penalty = [y.logsumexp(-1).square().sum()] if "penalty" in end else []
        every = [cross_entropy(y).sum(), *penalty]
        return sum(every if end == "penalty last" else every[::-1])

    def plain(y):
        return F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="none")

    (want,) = torch.autograd.grad(total(lambda x: x @ head.weight.detach().t(), plain), x)
    mine = total(head, lambda y: vocab_parallel_cross_entropy(y, labels, V, ctx))
    try:
        (got,) = torch.autograd.grad(mine, x)
    except RuntimeError as error:
        assert "penalty" in end and "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(got, want)


def test_labels_of_another_dtype_or_number_are_refused():
    logits, labels, _ = case(1.0)
    for wrong in (labels.int(), labels[1:], labels.t()):
        with pytest.raises(ValueError, match="of int64, one for each token"):
            vocab_parallel_cross_entropy(logits, wrong, V, LayerContext())


def test_bf16_logits_are_summed_in_fp32(world):
    """Against an fp64 oracle on the same bf16 logits: no worse than rounding the gradient once."""
    logits, labels, weight = case(1.0)
    logits = logits.bfloat16().double().requires_grad_()
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    (want * weight).sum().backward()
    ((loss, grad),) = world(1).run(parallel, 1, 17, 1.0, "bfloat16")
    torch.testing.assert_close(torch.from_numpy(loss).double(), want.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(grad), logits.grad, rtol=2**-8, atol=1e-6)
