# SPDX-License-Identifier: Apache-2.0
"""Masters and moments in host memory: the same bits as without."""

import pytest
import torch
from torch import Tensor, nn

from mpu.optim.adam import AdamW
from mpu.optim.interface import Parts
from mpu.optim.offload import Offload

LENGTHS = (3072, 1024, 2048)


def segments(masters: list[Tensor], grads: list[Tensor]) -> list[list[dict]]:
    """Each bucket's groups: its first 700 elements decay, the others do not."""
    buckets = []
    for master, grad in zip(masters, grads, strict=True):
        groups = []
        for low, high, decay in ((0, 700, 0.1), (700, len(master), 0.0)):
            segment = nn.Parameter(master[low:high])
            segment.grad = grad[low:high]
            groups.append({"params": [segment], "weight_decay": decay, "decoupled": False})
        buckets.append(groups)
    return buckets


def train(dtype: torch.dtype, offloaded: bool, device: str = "cpu") -> list[Tensor]:
    """Four steps, one skipped; return all weights, masters and moments, on the CPU."""
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, generator=g).to(device, dtype) for n in LENGTHS]
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    grads = [torch.zeros(n, dtype=accumulate, device=device) for n in LENGTHS]
    offload = Offload(grads, weights) if offloaded else None
    masters = offload.masters if offload else [w.to(accumulate) for w in weights]
    buckets = segments(masters, offload.gradients if offload else grads)
    if not offload:  # one for all buckets, as without offloading
        buckets = [[group for groups in buckets for group in groups]]
    adams = [AdamW().updater(Parts(b)) for b in buckets]
    for step in range(4):
        for grad in grads:
            grad.copy_(torch.randn(len(grad), generator=g))
        grads[1][5] = float("nan") if step == 1 else 0.5
        for group in (group for each in adams for group in each.groups):
            group["lr"] = 0.01 * (step + 1)
        factor = torch.tensor(1.0 / (step + 3), dtype=torch.float64, device=device)
        found_inf = torch.tensor(float(step == 1), device=device)
        if offload:
            offload.update([[each] for each in adams], factor, found_inf)
            continue
        adams[0].step(factor, found_inf)
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)
    assert all(each.steps == 3 for each in adams)
    moments = [
        moment
        for each in adams
        for group in each.groups
        for moment in each.state(group["params"][0]).values()
    ]
    return [t.detach().cpu() for t in (*weights, *masters, *moments)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_bits_as_on_the_device(dtype):
    got, want = train(dtype, offloaded=True), train(dtype, offloaded=False)
    assert len(got) == len(want) == 6 + 2 * 2 * len(LENGTHS)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_copies_either_way(dtype):
    weights = [torch.full((n,), 3.0, dtype=dtype) for n in LENGTHS]
    offload = Offload([torch.zeros(n) for n in LENGTHS], weights)
    assert all(torch.equal(m, w.float()) for m, w in zip(offload.masters, weights, strict=True))
    for master in offload.masters:
        master.fill_(1.0 + 2**-20)
    offload.weights_from_masters()
    want = 1.0 if dtype == torch.bfloat16 else 1.0 + 2**-20
    assert all(bool((w == want).all()) for w in weights)
    for weight in weights:
        weight.fill_(0.25)
    offload.masters_from_weights()
    assert all(bool((m == 0.25).all()) and m.dtype == torch.float32 for m in offload.masters)
