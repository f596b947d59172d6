# SPDX-License-Identifier: Apache-2.0
"""AdamW behind one interface: torch's kernel against AdamW written out, and FusedAdam's against it.

A class with the interface of apex and Transformer Engine stands in for FusedAdam.
"""

import sys
import types

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpu.accelerators import missing
from mpu.optim.adam import AdamW
from mpu.optim.interface import Parts, Updater

BETAS, EPS = (0.9, 0.95), 1e-8
SIZES, DECAY = ((7, 1024), (30,), (513,)), (0.1, 0.0, 0.1)


def make(backend: str, dtype: torch.dtype = torch.float32):
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
    return AdamW(BETAS, EPS, backend).updater(Parts(groups)), segments


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
    opt, segments = make("torch", dtype)
    want = by_hand(segments, [step for step in range(5) if step != skipped])
    for step in range(5):
        update(opt, segments, step, skip=step == skipped)
    near(state(opt, segments), want, 1e-14 if dtype == torch.float64 else 1e-6)
    assert opt.steps == (5 if skipped is None else 4)


def test_torch_scales_in_its_kernel():
    opt, segments = make("torch")
    _, copies = make("torch")
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


class FusedAdam(torch.optim.Optimizer):
    """The capturable mode that apex and Transformer Engine share, in plain torch.

    Counts as they do: a group's "step" moves on before this step's found_inf is copied, once for
    all groups, to `_dummy_overflow_buf`, and is 1 in a group's first step come what may. The kernel
    returns where the copy is 1; else it stores the gradients multiplied by one over the scale.
    """

    def _set_up(self, params, lr, bias_correction, betas, eps, decay, adam_w_mode, capturable):
        assert bias_correction and adam_w_mode and capturable
        lr = torch.tensor(lr, dtype=torch.float32)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=decay))
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)

    @torch.no_grad()
    def _run(self, grad_scaler):
        for group in self.param_groups:
            device = group["params"][0].device
            if "step" in group:
                group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
            else:
                group["step"] = torch.tensor([1], dtype=torch.int)
            for p in group["params"]:
                if len(self.state[p]) == 0:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            found_inf = grad_scaler._check_inf_per_device(self)[device]
            self._dummy_overflow_buf.copy_(found_inf)
            inv_scale = grad_scaler._get_scale_async().double().reciprocal().float()
            for p in group["params"]:
                self._kernel(p, group, inv_scale)

    def _kernel(self, p, group, inv_scale):
        lr, step, (beta1, beta2) = group["lr"], group["step"], group["betas"]
        assert lr.dtype == torch.float32 and lr.numel() == 1  # read through pointers
        assert step.dtype == torch.int and step.numel() == 1
        assert p.dtype == p.grad.dtype == torch.float32
        m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
        g = p.grad * inv_scale
        m2 = beta1 * m + (1 - beta1) * g
        v2 = beta2 * v + (1 - beta2) * g * g
        root = (v2 / (1 - torch.pow(beta2, step))).sqrt() + group["eps"]
        change = m2 / (1 - torch.pow(beta1, step)) / root + group["weight_decay"] * p
        for old, new in ((p.grad, g), (m, m2), (v, v2), (p, p - lr * change)):
            old.copy_(torch.where(self._dummy_overflow_buf == 1, old, new))


class ApexAdam(FusedAdam):
    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
        adam_w_mode=True, weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False,
        master_weights=False,
    ):  # fmt: skip
        self._set_up(params, lr, bias_correction, betas, eps, weight_decay, adam_w_mode, capturable)

    def step(
        self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None,
        grad_scaler=None,
    ):  # fmt: skip
        assert grads is output_params is scale is grad_norms is None
        self._run(grad_scaler)


class TEAdam(FusedAdam):
    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, *,
        bias_correction=True, adam_w_mode=True, capturable=False, master_weights=False,
    ):  # fmt: skip
        self._set_up(params, lr, bias_correction, betas, eps, weight_decay, adam_w_mode, capturable)

    def step(self, closure=None, grad_scaler=None):
        self._run(grad_scaler)


@pytest.fixture
def packages(monkeypatch):
    """Put packages with these classes where apex and Transformer Engine would be."""
    for path, cls in (
        ("apex.optimizers", ApexAdam),
        ("amp_C", None),
        ("transformer_engine.pytorch.optimizers", TEAdam),
        ("transformer_engine_torch", None),
    ):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        if cls:
            sys.modules[path].FusedAdam = cls


@pytest.mark.parametrize("skipped", [(), (0,), (2,), (4,), (0, 1, 3)])
@pytest.mark.parametrize("backend", ["apex", "te"])
def test_the_others_equal_torch(packages, backend, skipped):
    (opt, segments), (reference, copies) = make(backend), make("torch")
    for step in range(6):
        before = state(opt, segments)
        for each in ((opt, segments), (reference, copies)):
            update(*each, step, skip=step in skipped)
        if step in skipped:
            now = state(opt, segments)
            assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
        assert opt.steps == reference.steps
    near(state(opt, segments), state(reference, copies), 1e-6)
    assert opt.steps == 6 - len(skipped)


@pytest.mark.parametrize("backend", ["torch", "apex", "te"])
def test_resumes_bit_for_bit(packages, backend):
    opt, segments = make(backend)
    for step in range(3):
        update(opt, segments, step, skip=step == 2)
    resumed, copies = make(backend)
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


@pytest.mark.parametrize(
    "backend, dtype",
    [("torch", torch.float32), ("torch", torch.float64), ("apex", None), ("te", None)],
)
def test_a_step_does_not_wait_for_the_device(packages, backend, dtype):
    opt, segments = make(backend, dtype or torch.float32)
    inputs = [(factor(step), torch.tensor(float(step == 1))) for step in range(3)]
    with NoWaiting():
        for each in inputs:
            opt.step(*each)
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        assert opt.steps  # the mode sees what it is there for
    assert opt.steps == 2


def test_says_what_is_missing(packages, monkeypatch):
    flag, fp32 = "--optimizer-backend", torch.float32
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float64)):
        assert missing(flag, "torch", device, dtype) == ""
    for backend in ("apex", "te"):
        assert missing(flag, backend, "cuda", fp32) == ""
        assert missing(flag, backend, "cpu", fp32) == (
            f"{flag} {backend} has CUDA kernels only: use --optimizer-backend torch on cpu"
        )
        fp64 = f"{flag} {backend} updates fp32 masters only, not float64: use {flag} torch"
        assert missing(flag, backend, "cuda", torch.float64) == fp64
        with pytest.raises(ValueError, match=fp64):
            make(backend, torch.float64)
    monkeypatch.delattr(sys.modules["apex.optimizers"], "FusedAdam")  # another package's name
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", None)  # import fails
    for backend, package, error in (
        ("apex", "NVIDIA apex, built with its CUDA extensions,", "AttributeError"),
        ("te", "Transformer Engine", "ModuleNotFoundError"),
    ):
        said = missing(flag, backend, "cuda", fp32)
        assert said.startswith(f"--optimizer-backend {backend} needs {package} which cannot be")
        assert error in said and said.endswith("install it or use --optimizer-backend torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_are_those_of_torch_optim(dtype):
    """Over steps with other rates and scales, and one that is skipped."""
    opt, segments = make("torch", dtype)
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
