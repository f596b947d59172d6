# SPDX-License-Identifier: Apache-2.0
"""The AdamW kernel in Triton's interpreter, and compiled for GPUs without one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="this platform has no triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import pretrain_llama
from mpu.kernels import adamw
from mpu.optim.adam import AdamW
from mpu.optim.interface import Parts
from tests.model import twin
from tests.mpu.kernels.test_ahead_of_time import spilled
from tests.mpu.optim import test_adam as cases
from training.faults.monitor import FailureMonitor


def on_kernel(comm, skipped):
    """Take steps with torch's kernel and with ours; return the worst differences of both."""
    reference, copies = cases.make("torch")
    worst = 0.0
    groups = [
        {**group, "params": [nn.Parameter(s.detach().clone()) for s in group["params"]]}
        for group in reference.groups
    ]
    segments = [segment for group in groups for segment in group["params"]]
    weights = {s: s.detach().bfloat16() for s in segments[1:]}  # the first has none
    for segment in segments:
        segment.grad = torch.zeros_like(segment)
    opt = AdamW(cases.BETAS, cases.EPS, "triton").updater(Parts(groups, weights))
    assert opt.rounds and opt.steps == 0
    for step in range(6):
        before = cases.state(opt, segments) + [w.clone() for w in weights.values()]
        for each in ((opt, segments), (reference, copies)):
            cases.update(*each, step, skip=step in skipped)
        now = cases.state(opt, segments) + list(weights.values())
        if step in skipped:
            assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
        for mine, theirs in zip(
            cases.state(opt, segments), cases.state(reference, copies), strict=True
        ):
            ulps = (mine - theirs).abs() / theirs.abs().clamp(min=0.1) * 2**23
            worst = max(worst, ulps.max().item())
        for segment, weight in weights.items():  # which the interpreter cuts off, not rounds
            assert ((segment - weight.float()).abs() <= segment.abs() * 2.0**-7).all()
    assert opt.steps == reference.steps == 6 - len(skipped)
    taken = [step for step in range(6) if step not in skipped]
    exact = cases.by_hand(cases.make("torch")[1], taken)
    cases.near(cases.state(opt, segments), exact, 1e-6)
    resumed = AdamW(cases.BETAS, cases.EPS, "triton").updater(Parts(groups))
    resumed.set_steps(4)
    assert resumed.steps == 4
    return worst


@pytest.mark.parametrize("skipped", [pytest.param((), marks=pytest.mark.prove), (0, 3)])
def test_equals_torch(interpreted, skipped):
    """Six steps: within 10 ulps of the larger of a number and 0.1; gradients are of size 1."""
    (worst,) = interpreted(1).run(on_kernel, skipped)
    assert worst <= 10


def whole_model(comm, zero: int):
    """Train three steps in bf16 with each backend; return both's losses and masters."""
    case = dict(tp=1, dp=2, sp=False, recompute=None, tied=True, m=3, lr=1e-2, dtype="bfloat16")
    config, found = twin.config_of(case | dict(zero=zero)), []
    for backend in ("torch", "triton"):
        layout = replace(config.parallel, optimizer_backend=backend)
        run = pretrain_llama.build(
            replace(config, parallel=layout), comm.grid(1), torch.device("cpu"), FailureMonitor()
        )
        for step in range(3):
            batches = twin.micro_batches(case, comm.rank, step)
            loss, _, _ = pretrain_llama.train_step(run, batches, 1e-2)
        run.sink.wait_for_weights()
        for bucket, master in zip(run.sink.buckets, run.optimizer.masters, strict=True):
            ulp = master.abs() * 2.0**-7 + 1e-30  # cut off by the interpreter
            assert ((bucket.param_shard.float() - master).abs() <= ulp).all()
        found.append((loss.item(), torch.cat(run.optimizer.masters)))
    return [(loss, masters.numpy()) for loss, masters in found]


@pytest.mark.prove
@pytest.mark.parametrize("zero", [0, 1])
def test_the_optimizer_needs_no_copy_into_the_weights(interpreted, zero):
    for torchs, ours in interpreted(2).run(whole_model, zero):
        assert ours[0] == pytest.approx(torchs[0], rel=2e-3)
        a, b = torch.from_numpy(ours[1]), torch.from_numpy(torchs[1])
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("major", [8, 9, 10])
@pytest.mark.parametrize("weight", ["*bf16", None])
def test_compiles_and_spills_nothing(major, weight, tmp_path):
    kernel = adamw.adamw_kernel
    numbers = ("lr", "shrink", "beta1", "rest1", "beta2", "rest2", "eps")
    constants = {"BLOCK": adamw.BLOCK} | ({} if weight else {"weight": None})
    types = {"n": "i32", "weight": weight} | dict.fromkeys(numbers, "fp32")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source, target = (
        ASTSource(kernel.jitted, signature, constants, attrs),
        GPUTarget("cuda", 10 * major, 32),
    )
    asm = triton.compile(source, target=target, options={"num_warps": adamw.WARPS}).asm
    assert not spilled(asm, tmp_path)
    assert ("cvt.rn.bf16" in asm["ptx"]) == bool(weight) and "sqrt.rn.f32" in asm["ptx"]
