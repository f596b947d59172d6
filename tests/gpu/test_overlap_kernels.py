# SPDX-License-Identifier: Apache-2.0
"""The overlap kernels between 2, 4 and 8 processes on one GPU; `make gpu-check PART=overlap` runs
it, after it has compiled the kernels of these cases.

The processes take turns on the GPU, so this tests results, not speed. torch's symmetric memory is
set to let ranks share a device; the groups are gloo's.
"""

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")

from tests.conftest import World
from tests.gpu.overlap_cases import LARGEST, SIZES, of_training, ragged, workspace_on_gpu
from tests.mpu.kernels.cases import Turns, check, run_cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=SIZES)
def ranks(request):
    """A world whose ranks share one GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        world = World(request.param, "spawn")
    yield world
    world.close()


def memory(comm):
    if not hasattr(comm, "cuda_memory"):
        comm.cuda_memory = Turns(workspace_on_gpu(comm.rank, comm.size))
    return comm.cuda_memory


def run(comm, cases):
    return run_cases(memory(comm), cases)


@pytest.mark.parametrize("largest", LARGEST)
def test_ragged_shapes_and_late_ranks(ranks, largest):
    cases = ragged(ranks.size, largest)
    for start in range(0, len(cases), 26):
        check(ranks.run(run, cases[start : start + 26]))


def test_the_blocks_that_training_takes(ranks):
    check(ranks.run(run, of_training(ranks.size)))


def copy_beside(comm):
    """Send rows by copy engines while this stream multiplies; return the ranks that arrived."""
    space, came = memory(comm).workspace, []
    for step in range(6):
        x = torch.full((300, 77), 10.0 * step + comm.rank, device=space.device)
        turn = space.begin(x.nbytes)
        turn.send(x)
        torch.mm(x.t(), x)
        turn.arrive()
        whole = turn.gathered((300, 77), x.dtype).view(comm.size, -1) - 10.0 * step
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
