# SPDX-License-Identifier: Apache-2.0
"""One real NCCL communicator, of one rank; `make gpu-check PART=trainer` runs it.

A world of one needs no collective, so no run of the trainer on one GPU makes a communicator.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpu.comm.collectives import ProcessGroupTransport
from mpu.comm.transport import Axis, Splits

pytestmark = pytest.mark.gpu


@pytest.fixture
def axis(tmp_path):
    """An axis over a process group of NCCL."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield Axis("world", 0, 1, (0,), ProcessGroupTransport(dist.group.WORLD))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_collective_of_a_step(axis, dtype):
    """The verbs leave an axis of one rank alone, so its transport is asked."""
    x = torch.arange(24, device="cuda", dtype=dtype).view(6, 4)
    carrier = axis.required_transport
    summed, done = carrier.all_reduce(x.clone(), axis, True, dist.ReduceOp.SUM, None)
    done.wait()
    gathered, done = carrier.all_gather(x, axis, True, None, None)
    done.wait()
    scattered, done = carrier.reduce_scatter(x, axis, True, None, None)
    done.wait()
    exchanged, done = carrier.all_to_all(x, axis, True, Splits((6,), (6,)), None)
    done.wait()
    torch.cuda.synchronize()
    assert all(torch.equal(x, out) for out in (summed, gathered, scattered, exchanged))
