# SPDX-License-Identifier: Apache-2.0
"""The output layer's z-loss, and what the log says of layers, held to the serial twin."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pretrain_llama
from mpu.context import LayerContext
from mpu.layers.cross_entropy import vocab_parallel_cross_entropy
from tests.model.twin import Twin, compare, config_of, grid_of, micro_batches
from training.faults.monitor import FailureMonitor
from training.run.layer_values import LayerValues
from training.settings.arguments import LogConfig

C = 0.02
BASE = dict(tp=1, dp=1, sp=False, recompute=None, tied=True, m=1, rows=8, s=16, layers=2)
Z = BASE | dict(muon=dict(output_z_loss_coeff=C), masks=True)
Z_LAYOUTS = [
    dict(tp=2, sp=True, dp=2, zero=3),
    dict(tp=4, chunk=16),  # --fused-linear-cross-entropy
    dict(pp=2, dp=2, m=2, schedule="zb-h1", chunk=8),  # whose weight gradient is deferred
    dict(cp=2, tp=2, sp=True, chunk=16, tied=False),
]
twins: dict[bool, tuple[Twin, float, float]] = {}


def twin_of(case: dict[str, Any]) -> tuple[Twin, float, float]:
    if case["tied"] not in twins:
        twin = Twin(case["tied"], case["layers"], case["rows"], s=case["s"])
        twin.z_loss = C
        (loss,), (norm,) = twin.train(1, 0.0, 0.0, case=case)
        twins[case["tied"]] = twin, loss, norm
    return twins[case["tied"]]


def test_the_z_loss_is_the_twins(world: Any) -> None:
    compare(world, twin_of, 4, [Z | each for each in Z_LAYOUTS])


def test_the_z_loss_is_apart_in_the_log_and_absent_in_an_evaluation() -> None:
    ctx = LayerContext(dtype=torch.float64, accumulate=torch.float64, output_z_loss=C)
    ctx.auxiliary_losses.begin(6)
    logits = torch.randn(3, 2, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (3, 2))
    loss = vocab_parallel_cross_entropy(logits, labels, 11, ctx)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(loss.flatten(), want)
    (loss.sum() / 6).backward()
    z = C * logits.detach().flatten(0, 1).logsumexp(-1).square().sum()
    torch.testing.assert_close(ctx.auxiliary_losses.take(), z)


@pytest.mark.parametrize("shift", [-40.0, 0.0, 40.0])
def test_the_gradient_of_the_z_loss_is_exact_where_it_can_be(shift: float) -> None:
    """Up to a log of the sum of -1/(2 c), where a clamp begins: here -25, and -40 is below it."""
    ctx = LayerContext(dtype=torch.float64, accumulate=torch.float64, output_z_loss=C)
    x = (torch.randn(4, 1, 7, dtype=torch.float64) + shift).requires_grad_()
    labels = torch.randint(0, 7, (4, 1))
    vocab_parallel_cross_entropy(x, labels, 7, ctx).sum().backward()
    y = x.detach().clone().requires_grad_()
    ce = F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="sum")
    (ce + C * y.logsumexp(-1).square().sum()).backward()
    if shift > -25:
        torch.testing.assert_close(x.grad, y.grad)
    else:
        target = F.one_hot(labels, 7).double()
        torch.testing.assert_close(x.grad, -target)


RMS = BASE | dict(rows=8, masks=True, tied=False)
RMS_LAYOUTS = [
    dict(),
    dict(tp=2, sp=True, dp=2, zero=2, recompute="full"),
    dict(tp=2, cp=2, m=2),
    dict(pp=2, dp=2, m=4, zero=3),
]


def values_of(comm: Any, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    found = []
    for case in cases:
        config = config_of(case)
        log = LogConfig(log_layer_rms_interval=1, log_max_attention_logit=True)
        config = replace(config, log=log)
        grid = grid_of(comm, config)
        run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
        values = LayerValues(run)
        batches = micro_batches(case, grid.dp.rank, 0, (grid.cp.rank, grid.cp.size))
        for _ in range(2):  # the first is forgotten
            pretrain_llama.train_step(run, batches, 0.0)
        run.iteration += 1
        found.append(values(0))
    return found


class Seeing(Twin):
    """Notes the RMS of what each block returns, and the largest score."""

    def auxiliary(self, h: torch.Tensor) -> float:
        self.seen.append(h.detach().square().mean().sqrt().item())
        return 0.0

    def scores(self, scores: torch.Tensor, layer: int) -> torch.Tensor:
        self.top = max(self.top, scores.max().item())
        return scores


def test_the_log_of_layers_is_the_twins(world: Any) -> None:
    twin = Seeing(False, RMS["layers"], RMS["rows"], s=RMS["s"])
    twin.seen, twin.top = [], -torch.inf
    twin.train(1, 0.0, 0.0, case=RMS)
    want = {f"layer_{i}/activation_rms": rms for i, rms in enumerate(twin.seen)}
    want["max_attention_logit"] = twin.top
    names = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
    for at in [*names, "model.layers.0", "model.layers.1"]:
        grads = [w.grad.flatten() for n, w in twin.w.items() if n.startswith(f"{at}.")]
        key = names.get(at, f"layer_{at[-1]}")
        want[f"{key}/grad_rms"] = torch.cat(grads).square().mean().sqrt().item()
    for ranks in world(4).run(values_of, [RMS | each for each in RMS_LAYOUTS[1:]]):
        for case, values in zip(RMS_LAYOUTS[1:], ranks, strict=True):
            assert values == pytest.approx(want, rel=1e-11), case
