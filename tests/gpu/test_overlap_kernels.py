# SPDX-License-Identifier: Apache-2.0
"""The overlap kernels between 2, 4 and 8 processes on one GPU; `make gpu-check` runs it.

The processes take turns on the GPU, so this tests results, not speed. torch's symmetric memory is
set to let ranks share a device; the groups are gloo's.
"""

from datetime import timedelta

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")

from tests.conftest import World
from tests.mpu.kernels.cases import Turns, check, run_cases, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.fixture(scope="module", params=[2, 4, 8])
def ranks(request):
    """A world whose ranks share one GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        world = World(request.param)
    yield world
    world.close()


def make(comm):
    """Return this rank's memory on the GPU."""
    from mpu.comm.symmetric_cuda import CudaWorkspace
    from mpu.grid import Grid
    from mpu.launch import Launch

    device, timeout = torch.device("cuda", 0), timedelta(seconds=60)
    torch.cuda.set_device(device)
    launch = Launch(comm.rank, comm.size, 0, comm.size)
    grid = Grid(comm.size, comm.size, 1, 1, launch, "gloo")
    return Turns(CudaWorkspace(grid.add_groups(device, timeout).tp, device, timeout))


def memory(comm):
    if not hasattr(comm, "cuda_memory"):
        comm.cuda_memory = make(comm)
    return comm.cuda_memory


def run(comm, cases):
    return run_cases(memory(comm), cases)


@pytest.mark.parametrize("largest", [60, 700])
def test_ragged_shapes_and_late_ranks(ranks, largest):
    """Small tiles and few programs, so that tiles, chunks and waits are many."""
    more = dict(delay=0.005, in_place=False, block=64)
    cases = sample(104, ranks.size, seed=ranks.size, largest=largest, **more)
    for start in range(0, len(cases), 26):
        check(ranks.run(run, cases[start : start + 26]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_blocks_that_training_takes(ranks, dtype):
    """A projection of a layer, with the tiles, the chunks and the TMA of real use."""
    cases = sample(8, ranks.size, seed=1, in_place=False)
    cases = [c | dict(dtype=dtype, shape=(512, 768, 1024), integer=True) for c in cases]
    check(ranks.run(run, [case | dict(chunk_rows=128, block=None) for case in cases]))


def copy_beside(comm):
    """Send rows by copy engines while this stream multiplies; return the ranks that arrived."""
    space, came = memory(comm).workspace, []
    for step in range(6):
        x = torch.full((300, 77), 10.0 * step + comm.rank, device=space.device)
        turn = space.begin(x.nbytes)
        turn.send(x)
        torch.mm(x.t(), x)
        turn.arrive()
        whole = turn.whole((300, 77), x.dtype).view(comm.size, -1) - 10.0 * step
        came.append((whole.amin(1).tolist(), whole.amax(1).tolist()))
        turn.close()
    space.check()
    return came


def test_rows_that_copy_engines_copy(ranks):
    every = list(map(float, range(ranks.size)))
    assert ranks.run(copy_beside) == [[(every, every)] * 6] * ranks.size


def wait_in_vain(comm):
    """Rank 0 waits for a flag that nobody raises; the process, and its GPU, live on."""
    from mpu.comm.transport import CommunicationError
    from mpu.kernels.signals import wait_flags

    space = memory(comm)
    if comm.rank == 0:
        never = torch.tensor([1 << 30], dtype=torch.int32, device=space.device)
        arrived = space.workspace.memory.slots[0].arrived
        wait_flags(arrived, never, 1000, space.workspace.error)
        torch.cuda.synchronize()
        with pytest.raises(CommunicationError, match="did not raise its flag"):
            space.workspace.check()
        space.workspace.error.zero_()
    return float(torch.ones(8, device=space.device).sum())


def test_a_wait_that_runs_out(ranks):
    assert ranks.run(wait_in_vain) == [8.0] * ranks.size
