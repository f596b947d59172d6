# SPDX-License-Identifier: Apache-2.0
"""AdamW on flat buckets against torch's AdamW on separate tensors; clipping, skipping."""

import pytest
import torch
from torch import nn

from mpu.comm.meta import MetaTransport
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.optim.adam import AdamW
from mpu.optim.interface import Group
from mpu.optim.muon import Muon
from mpu.optim.optimizer import Optimizer
from mpu.param import group_of
from mpu.zero.bucket_layout import BLOCK, ZeroConfig
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer

SHAPES = {"a": (40, 30), "n1": (30,), "b": (7, 5), "n2": (5,), "head": (9, 4)}


RULE = AdamW()
GROUPS = {
    "matrix": Group(RULE, 0.1),
    "vector": Group(RULE),
    "embedding": Group(RULE, 0.1, decoupled=True),
}


def make(dtype: torch.dtype, bucket: int, clip: float = 0.0):
    torch.manual_seed(0)
    module = nn.Module()
    for name, shape in SHAPES.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    sink = ParamAndGradBuffer(Grid(), accumulate, ZeroConfig(bucket_size=bucket))
    module.head.group = "embedding"
    sink.attach(module)
    optimizer = Optimizer(module, sink, Grid(), GROUPS, clip=clip)
    return module, sink, optimizer


def give(module, sink, step: int, scale: float = 1.0) -> dict:
    sink.begin_step()
    g, grads = torch.Generator().manual_seed(step), {}
    for name, param in module.named_parameters():
        grads[name] = torch.randn(param.shape, generator=g) * scale
        sink.add(param, grads[name])
    return grads


@pytest.mark.parametrize(
    "bucket, clip, dtype",
    [(1, 0.0, torch.float64), (1000, 0.5, torch.float32), (10**9, 0.5, torch.float64)],
)
def test_equals_adamw(bucket, clip, dtype):
    module, sink, optimizer = make(dtype, bucket, clip)
    twin = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    groups = [
        {"params": [twin["a"], twin["b"]], "weight_decay": 0.1},
        {"params": [twin["n1"], twin["n2"]], "weight_decay": 0.0},
        {"params": [twin["head"]], "weight_decay": 0.1, "lr": 0.03},
    ]
    adam = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        for name, grad in give(module, sink, step).items():
            twin[name].grad = grad.to(dtype)
        norm, found_inf = optimizer.step(0.01, 0.03)
        want = torch.nn.utils.clip_grad_norm_(list(twin.values()), clip or torch.inf)
        adam.step()
        assert found_inf.item() == 0 and norm.item() == pytest.approx(want.item(), rel=1e-6)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for name, param in module.named_parameters():
        assert (param - twin[name]).norm() <= tolerance * twin[name].norm(), name
    assert optimizer.steps == 5


def test_bf16_weights_follow_fp32_masters():
    module, sink, optimizer = make(torch.bfloat16, 1000)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    for step in range(3):
        give(module, sink, step)
        optimizer.step(1e-4)
    masters = {n: t for n, kind, first, t in optimizer.named_state() if kind == "master"}
    for name, param in module.named_parameters():
        assert masters[name].dtype == torch.float32
        assert torch.equal(param.flatten(), masters[name].bfloat16()), name
        assert not torch.equal(masters[name], before[name].float().flatten()), name


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_gradient_skips_the_update(poison):
    module, sink, optimizer = make(torch.float32, 1000, clip=1.0)
    give(module, sink, 0)
    optimizer.step(0.01)
    before = [p.detach().clone() for p in module.parameters()]
    state = [t.clone() for *_, t in optimizer.named_state()]
    give(module, sink, 1)
    sink.main[module.b][3, 2] = poison
    norm, found_inf = optimizer.step(0.01)
    assert found_inf.item() == 1 and not torch.isfinite(norm)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    assert all(torch.equal(t, s) for (*_, t), s in zip(optimizer.named_state(), state, strict=True))
    assert optimizer.steps == 1


def test_a_scale_multiplies_gradients_and_norm():
    module, sink, optimizer = make(torch.float64, 1000, clip=0.5)
    give(module, sink, 0, scale=3.0)
    norm, _ = optimizer.step(0.01)
    other, sink2, optimizer2 = make(torch.float64, 1000, clip=0.5)
    give(other, sink2, 0)
    scaled, _ = optimizer2.step(0.01, None, torch.tensor(3.0, dtype=torch.float64))
    assert scaled.item() == pytest.approx(norm.item(), rel=1e-6)
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_the_norm_counts_each_parameter_once_in_fixed_blocks():
    """A flat layout of several blocks: the norm is the 2-norm of all gradients, whatever the
    buckets.
    """
    grads = {f"p{i}": torch.randn(n) for i, n in enumerate((BLOCK + 5, 7, 3 * BLOCK, 1))}
    norms = set()
    for size in (1, BLOCK, 10**9):
        module = nn.Module()
        for name, grad in grads.items():
            module.register_parameter(name, nn.Parameter(torch.zeros_like(grad)))
        sink = ParamAndGradBuffer(Grid(), torch.float32, ZeroConfig(bucket_size=size))
        sink.attach(module)
        optimizer = Optimizer(module, sink, Grid(), GROUPS)
        sink.begin_step()
        for name, grad in grads.items():
            sink.add(module.get_parameter(name), grad)
        norms.add(optimizer.grad_norm().item())
    assert len(norms) == 1
    want = torch.cat(list(grads.values())).double().norm().item()
    assert abs(norms.pop() - want) < 1e-6 * want


def test_whole_matrices_need_a_grid_that_has_their_axes():
    grid = Grid(2, launch=Launch(0, 2)).carried_by(MetaTransport())
    module = nn.Linear(8, 8, bias=False)
    sink = ParamAndGradBuffer(grid, torch.float32, ZeroConfig(zero_stage=1))
    sink.attach(module)
    with pytest.raises(ValueError, match="Muon .* make the Grid with needs_full_matrices=True"):
        Optimizer(module, sink, grid, {group_of(module.weight): Group(Muon())})
