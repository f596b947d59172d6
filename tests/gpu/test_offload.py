# SPDX-License-Identifier: Apache-2.0
"""Masters and moments in host memory under weights on a GPU; `make gpu-check` runs it.

Copies are exact. With --optimizer-cpu-offload the host's AdamW is the CPU's, so the bits are those
of a run on the CPU; with --optimizer-state-offload those of a run without it.
"""

import pytest
import torch

import pretrain_llama
from mpu.grid import Grid
from tests.model.twin import config_of, micro_batches
from tests.mpu.optim.test_offload import train
from tests.mpu.optim.test_state_offload import CASE
from training.faults.monitor import FailureMonitor
from training.run.device import set_arithmetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_of_the_cpu(dtype):
    got, want = train(dtype, offloaded=True, device="cuda"), train(dtype, offloaded=False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def steps(device: str, name: str, offloaded: bool) -> list[torch.Tensor]:
    """Three steps of a small Llama; return masters and state, on the CPU."""
    config = config_of(CASE | dict(optimizer=name, states=offloaded))
    run = pretrain_llama.build(config, Grid(), torch.device(device), FailureMonitor())
    for step in range(3):
        batches = [batch.to(run.device) for batch in micro_batches(CASE, 0, step)]
        pretrain_llama.train_step(run, batches, 1e-2)
    return [values.cpu().clone() for *_, values in run.optimizer.named_state()]


@pytest.fixture
def repeatable():
    """As --deterministic-mode: else the embedding's gradients are added in any order."""
    set_arithmetic(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_state_that_is_away_between_steps_has_the_bits_of_state_that_stays(name, repeatable):
    away, stays = (steps("cuda", name, offloaded) for offloaded in (True, False))
    assert len(away) == len(stays) > 0
    assert all(torch.equal(a, b) for a, b in zip(away, stays, strict=True))
