# SPDX-License-Identifier: Apache-2.0
"""Masters and moments in host memory under weights on a GPU; `make gpu-check` runs it.

Copies are exact. With --optimizer-cpu-offload the host's AdamW is the CPU's, so the bits are those
of a run on the CPU; with --optimizer-state-offload those of a run without it.
"""

import pytest
import torch
import torch.multiprocessing as mp

import pretrain_llama
from mpu.grid import Grid
from tests.model.twin import config_of, micro_batches
from tests.mpu.optim.test_offload import train
from tests.mpu.optim.test_state_offload import CASE
from training.faults.monitor import FailureMonitor
from training.run.device import set_arithmetic

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_of_the_cpu(dtype, device):
    got, want = train(dtype, offloaded=True, device=device), train(dtype, offloaded=False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def steps(device: str, name: str, offloaded: bool) -> list[torch.Tensor]:
    """Three steps of a small Llama; return masters and state, on the CPU."""
    config = config_of(CASE | dict(optimizer=name, states=offloaded))
    run = pretrain_llama.build(config, Grid(), torch.device(device), FailureMonitor())
    for step in range(3):
        batches = [batch.to(run.device) for batch in micro_batches(CASE, 0, step)]
        pretrain_llama.train_step(run, batches, 1e-2)
    return [values.cpu().clone() for *_, values in run.optimizer.named_state()]


def both(rank: int, device: str, name: str, path: str) -> None:
    """Save the state of steps in deterministic mode, offloaded and not. torch and cuBLAS read their
    settings once, before the first product, so this is a process of its own.
    """
    set_arithmetic(True)  # else the embedding's gradients are added in any order
    torch.save([steps(device, name, offloaded) for offloaded in (True, False)], path)


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_state_that_is_away_between_steps_has_the_bits_of_state_that_stays(tmp_path, name, device):
    path = str(tmp_path / "state.pt")
    mp.spawn(both, (device, name, path), nprocs=1)
    away, stays = torch.load(path)
    assert len(away) == len(stays) > 0
    assert all(torch.equal(a, b) for a, b in zip(away, stays, strict=True))
