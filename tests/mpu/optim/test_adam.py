# SPDX-License-Identifier: Apache-2.0
"""AdamW by torch's kernel, against AdamW written out and torch.optim."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpu.optim.adam import AdamW
from mpu.optim.interface import Parts, Updater

BETAS, EPS = (0.9, 0.95), 1e-8
SIZES, DECAY = ((7, 1024), (30,), (513,)), (0.1, 0.0, 0.1)


def make(dtype: torch.dtype = torch.float32):
    """Three groups, as norms, an output layer and the rest are."""
    g = torch.Generator().manual_seed(0)
    groups = [
        {
            "params": [nn.Parameter(torch.randn(n, generator=g).to(dtype)) for n in sizes],
            "weight_decay": decay,
            "decoupled": sizes == SIZES[2],
        }
        for sizes, decay in zip(SIZES, DECAY, strict=True)
    ]
    segments = [segment for group in groups for segment in group["params"]]
    for segment in segments:
        segment.grad = torch.zeros_like(segment)
    return AdamW(BETAS, EPS).updater(Parts(groups)), segments


def give(step: int, segments: list[Tensor]) -> list[Tensor]:
    """Put the gradients of a step where they belong; return them in fp64."""
    g = torch.Generator().manual_seed(100 + step)
    grads = [torch.randn(len(s), generator=g) for s in segments]
    for segment, grad in zip(segments, grads, strict=True):
        segment.grad.copy_(grad)
    return [grad.double() for grad in grads]


def factor(step: int) -> Tensor:
    return torch.tensor([1.0, 0.37, 2.5][step % 3], dtype=torch.float64)


def update(opt: Updater, segments: list[Tensor], step: int, skip: bool = False) -> None:
    give(step, segments)
    if skip:
        segments[0].grad[3] = float("nan")
    for group in opt.groups:
        group["lr"] = 0.01 * (step + 1) * (0.5 if group["decoupled"] else 1.0)
    opt.step(factor(step), torch.tensor(float(skip)))


def state(opt: Updater, segments: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for s in segments for t in (s, *opt.state(s).values())]


def by_hand(segments: list[Tensor], steps: list[int]) -> list[Tensor]:
    """AdamW in fp64: weights and both moments of every segment after `steps`."""
    sizes = [n for group in SIZES for n in group]
    decay = [d for group, d in zip(SIZES, DECAY, strict=True) for _ in group]
    weights = [s.detach().double().clone() for s in segments]
    first = [torch.zeros(n, dtype=torch.float64) for n in sizes]
    second = [torch.zeros(n, dtype=torch.float64) for n in sizes]
    for t, step in enumerate(steps, 1):
        grads = give(step, segments)
        for i, grad in enumerate(grads):
            g = grad * factor(step)
            lr = 0.01 * (step + 1) * (0.5 if i == len(sizes) - 1 else 1.0)
            first[i] = BETAS[0] * first[i] + (1 - BETAS[0]) * g
            second[i] = BETAS[1] * second[i] + (1 - BETAS[1]) * g * g
            root = (second[i] / (1 - BETAS[1] ** t)).sqrt() + EPS
            weights[i] = weights[i] * (1 - lr * decay[i])
            weights[i] -= lr * (first[i] / (1 - BETAS[0] ** t)) / root
    return [t for group in zip(weights, first, second, strict=True) for t in group]


def near(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("skipped", [None, 0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_is_adamw_written_out(dtype, skipped):
    opt, segments = make(dtype)
    want = by_hand(segments, [step for step in range(5) if step != skipped])
    for step in range(5):
        update(opt, segments, step, skip=step == skipped)
    near(state(opt, segments), want, 1e-14 if dtype == torch.float64 else 1e-6)
    assert opt.steps == (5 if skipped is None else 4)


def test_torch_scales_in_its_kernel():
    opt, segments = make()
    _, copies = make()
    groups = [{"params": copies[:2], "weight_decay": 0.1}, {"params": copies[2:3]}]
    groups.append({"params": copies[3:], "weight_decay": 0.1})
    plain = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
    for step in range(4):
        update(opt, segments, step)
        give(step, copies)
        for ours, theirs in zip(opt.groups, plain.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        plain.grad_scale, plain.found_inf = (1.0 / factor(step)).float(), torch.tensor(0.0)
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(segments, copies, strict=True))


def test_resumes_bit_for_bit():
    opt, segments = make()
    for step in range(3):
        update(opt, segments, step, skip=step == 2)
    resumed, copies = make()
    assert resumed.steps == 0 and not any(
        m.any() for s in copies for m in resumed.state(s).values()
    )
    for old, new in zip(segments, copies, strict=True):
        new.data.copy_(old)
        for kind, values in opt.state(old).items():
            resumed.state(new)[kind].copy_(values)
    resumed.set_steps(opt.steps)
    for each in ((opt, segments), (resumed, copies)):
        update(*each, 3)
    got, want = state(resumed, copies), state(opt, segments)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert resumed.steps == opt.steps == 3


class NoWaiting(TorchDispatchMode):
    """Fail where a value would have to come from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")
        name = func.overloadpacket.__name__
        assert name not in waits, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_does_not_wait_for_the_device(dtype):
    opt, segments = make(dtype)
    inputs = [(factor(step), torch.tensor(float(step == 1))) for step in range(3)]
    with NoWaiting():
        for each in inputs:
            opt.step(*each)
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        assert opt.steps  # the mode sees what it is there for
    assert opt.steps == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_are_those_of_torch_optim(dtype):
    """Over steps with other rates and scales, and one that is skipped."""
    opt, segments = make(dtype)
    theirs = [nn.Parameter(s.detach().clone()) for s in segments]
    groups, rest = [], list(theirs)
    for group in opt.groups:
        few = [rest.pop(0) for _ in group["params"]]
        groups.append({"params": few, "weight_decay": group["weight_decay"]})
    peer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, fused=True)
    for step in range(4):
        found_inf = torch.tensor(float(step == 2))
        give(step, segments)
        wide = dtype == torch.float64
        for mine, his in zip(segments, theirs, strict=True):
            his.grad = mine.grad * factor(step) if wide else mine.grad.clone()
        for mine, his in zip(opt.groups, peer.param_groups, strict=True):
            mine["lr"] = his["lr"] = 0.01 * (step + 1)
        peer.grad_scale = None if wide else (1.0 / factor(step)).float()
        peer.found_inf = found_inf
        opt.step(factor(step), found_inf)
        peer.step()
    assert opt.steps == 3 == int(peer.state[theirs[0]]["step"])
    for mine, his in zip(segments, theirs, strict=True):
        assert torch.equal(mine, his)
        for name, tensor in opt.state(mine).items():
            assert torch.equal(tensor, peer.state[his][name]), name
