# SPDX-License-Identifier: Apache-2.0
"""Recomputation changes what is kept, never a bit of the result."""

import pytest
import torch

from mpu.recompute import Recompute, recompute


class Layer:
    """h -> tanh(h w) scaled by `shared`; counts how often it ran."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.w, self.runs = torch.randn(4, 4, generator=g, requires_grad=True), 0

    def __call__(self, h, shared, none):
        assert none is None
        self.runs += 1
        return torch.tanh(h @ self.w) * shared


WAYS = {  # name: (granularity, method, num_layers, forwards each of 5 layers runs)
    "none": (None, None, 1, [1, 1, 1, 1, 1]),
    "uniform 1": ("full", "uniform", 1, [2, 2, 2, 2, 2]),
    "uniform 2": ("full", "uniform", 2, [2, 2, 2, 2, 2]),
    "block 3": ("full", "block", 3, [2, 2, 2, 1, 1]),
}


def run(way: str):
    granularity, method, count, _ = WAYS[way]
    layers = [Layer(i) for i in range(5)]
    h = torch.randn(3, 4, generator=torch.Generator().manual_seed(9), requires_grad=True)
    y = Recompute(granularity, method, count).blocks(layers, h, torch.tensor(0.5), None)
    y.square().sum().backward()
    return y.detach(), h.grad, [layer.w.grad for layer in layers], [layer.runs for layer in layers]


@pytest.mark.parametrize("way", WAYS)
def test_blocks(way):
    y, dh, dw, runs = run(way)
    y0, dh0, dw0, _ = run("none")
    assert torch.equal(y, y0) and torch.equal(dh, dh0)
    assert all(torch.equal(a, b) for a, b in zip(dw, dw0, strict=True))
    assert runs == WAYS[way][3]


def test_only_the_inputs_are_kept():
    kept = []
    x = torch.randn(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        recompute(lambda x: (x * 2).exp().exp().exp(), x)
    assert kept == [1000]


def test_selective_recomputes_the_attention_core_only():
    calls = []
    plan = Recompute("selective")
    x = torch.randn(3, requires_grad=True)
    plan.selective(lambda x: calls.append(1) or x.exp())(x).sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        plan.selective(lambda x: calls.append(1) or x.exp())(x)
    assert len(calls) == 3


def test_a_wrong_granularity_is_refused():
    with pytest.raises(ValueError, match="--recompute-granularity half"):
        Recompute("half")


def test_a_tensor_that_is_given_by_name_gets_its_gradient():
    """A gate of a fork's attention: its own graph is not run inside the recomputation."""
    x, w = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def attention(x: torch.Tensor, scale: float, *, gate: torch.Tensor) -> torch.Tensor:
        return scale * x.tanh() * gate

    def loss(run):
        h = x * x
        return run(h, 2.0, gate=(h * w).tanh()).sum()

    want = torch.autograd.grad(loss(attention), (x, w))
    got = torch.autograd.grad(loss(lambda *a, **k: recompute(attention, *a, **k)), (x, w))
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)
