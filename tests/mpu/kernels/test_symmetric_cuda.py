# SPDX-License-Identifier: Apache-2.0
"""The turns of GPUs (mpu/comm/symmetric_cuda.py) and what layers do with them, without a GPU.

torch's symmetric memory is played by memory of the host, streams by none, and the kernels run in
Triton's interpreter between processes.
"""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")

from tests.mpu.kernels.cases import Turns, check, give_way, matmul_reduce_scatter, run_cases, sample

LINE = 64
TIMEOUT = timedelta(seconds=60)


class SharedByAll:
    """torch's symmetric memory, played by memory of the host: a stretch of it for each rank.

    A rank's tensor begins some lines into its stretch, as one from a pool of memory may.
    """

    def __init__(self, axis):
        self.axis = axis

    def empty(self, nbytes, dtype, device):
        from mpu.comm.symmetric import SymmetricBuffer

        stretch = -(-nbytes // 4096 + 1) * 4096
        self.all = SymmetricBuffer(self.axis, self.axis.size * stretch, TIMEOUT).data
        self.buffer_ptrs = [self.all.data_ptr() + r * stretch for r in range(self.axis.size)]
        first = self.axis.rank * (stretch + LINE)
        return self.all[first : first + nbytes].fill_(255)

    def rendezvous(self, memory, group):
        return self

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        first = self.buffer_ptrs[rank] - self.buffer_ptrs[0] + storage_offset
        return self.all[first : first + sizes[0]]


class NoStream:
    """A stream of a machine that does all things in turn."""

    def __init__(self, device=None, priority=0):
        pass

    def wait_stream(self, stream):
        pass


def gpu_workspace(comm, patch):
    """Make mpu/comm/symmetric_cuda.py's workspace, but for the GPU; return it with its axis."""
    from mpu.comm import symmetric_cuda

    give_way()
    axis = comm.grid(tp=comm.size).tp
    shared = SharedByAll(axis)
    patch.setattr(symmetric_cuda, "symmetric_memory", lambda: shared)
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
    patch.setattr(torch.cuda, "Stream", NoStream)
    patch.setattr(torch.cuda, "current_stream", NoStream)
    patch.setattr(torch.cuda, "stream", nullcontext)
    return symmetric_cuda.CudaWorkspace(axis, torch.device("cpu"), TIMEOUT), axis


def run_turns(comm, cases):
    """Run cases through the turns of GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        space = Turns(gpu_workspace(comm, patch)[0])
        worst = run_cases(space, cases)
        x = torch.full((3, 5), float(comm.rank))
        early = space.workspace.begin(x.nbytes)
        early.send(x)
        space.begin(3 << 20)  # the slots grow, and epochs begin anew
        early.arrive()
        assert torch.equal(early.gathered((3, 5), x.dtype)[::3, 0], torch.arange(float(comm.size)))
        early.close()
        space.end()
        assert space.workspace.memory.slot_bytes >= 12 << 20 and space.workspace.epoch == 1
        worst |= run_cases(space, cases[:1])
    return worst


@pytest.mark.prove
def test_the_turns_of_gpus(interpreted):
    cases = sample(8, 4, seed=6, largest=20)
    check(interpreted(4).run(run_turns, cases))


def launches(patch):
    """Record the kernels that are launched from now on, as a CUDA graph records them."""
    from mpu.kernels.launch import Kernel

    launch, recorded = Kernel.launch, []

    def record(self, grid, *args, **kwargs):
        recorded.append(lambda: launch(self, grid, *args, **kwargs))
        return launch(self, grid, *args, **kwargs)

    patch.setattr(Kernel, "launch", record)
    return recorded


def replay(comm):
    """Launch recorded kernels again, with nothing done on the host but to fill x anew.

    Three turns: a slot is used twice, the other once, so the slots' counts differ.
    """
    from mpu.kernels.all_gather_matmul import all_gather_matmul
    from mpu.overlap.cuda import chunk_rows

    with pytest.MonkeyPatch.context() as patch:
        space = gpu_workspace(comm, patch)[0]
        x, w, results = torch.ones(5, 16), torch.arange(48.0).view(3, 16), []
        recorded = launches(patch)
        for verb in (all_gather_matmul, matmul_reduce_scatter, all_gather_matmul):
            turn = space.begin(x.nbytes)
            operands = (results[0], w.t()) if verb is matmul_reduce_scatter else (x, w)
            results.append(verb(*operands, turn.exchange(chunk_rows(5))))
            turn.close()
        once = list(recorded)
        for step in range(2):
            x.fill_(10.0 * step + comm.rank)
            for result in results:
                result.fill_(float("nan"))
            for kernel in once:
                kernel()
            every = torch.cat([torch.full((5, 16), 10.0 * step + r) for r in range(comm.size)])
            y = every @ w.t()
            s = comm.size * (y @ w)[comm.rank * 5 : comm.rank * 5 + 5]
            assert all(torch.equal(a, b) for a, b in zip(results, (y, s, y), strict=True))
        assert space.epoch == 3 and not space.tickets.any()
        space.check()


@pytest.mark.prove
def test_recorded_launches_may_be_replayed(interpreted):
    """As a CUDA graph's: neither the epoch nor the slot's turn comes from the host."""
    interpreted(4).run(replay)


def run_path(comm, shapes):
    """Run a column and a row layer and all gradients over the kernels and by `none`."""
    import copy
    from dataclasses import replace

    from mpu.comm.collectives import group_of
    from mpu.comm.symmetric_cuda import CudaSymmetricTransport
    from mpu.context import LayerContext
    from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear, use_overlap
    from mpu.overlap.choices import OverlapMap

    class Refusing(CudaSymmetricTransport):
        def all_gather(self, *args):
            assert not self.refuses
            return super().all_gather(*args)

    same = []
    with pytest.MonkeyPatch.context() as patch:
        space, axis = gpu_workspace(comm, patch)
        grid = copy.copy(comm.grid(tp=comm.size))
        transport = Refusing(group_of(axis), space)
        grid.tp = replace(axis, transport=transport)
        for seed, (n, b, k, o) in enumerate(shapes):
            found = []
            for mode in ("none", "symmetric"):
                random = torch.Generator().manual_seed(100 * seed + comm.rank)

                def draw(*shape, random=random):
                    return torch.randint(-2, 3, shape, generator=random).float()

                ctx = LayerContext(grid, True)
                transport.refuses = mode == "symmetric"  # which has no need of the process group
                column = ColumnParallelLinear(k, comm.size * o, ctx=ctx)
                row = RowParallelLinear(comm.size * o, 3, ctx=ctx)
                for layer in (column, row):
                    kind = type(use_overlap(layer, OverlapMap(mode))).__name__
                    assert kind == ("NoOverlap" if mode == "none" else "KernelOverlap")
                    layer.weight.data.copy_(draw(*layer.weight.shape))
                x = draw(n, b, k).requires_grad_()
                y = column(x)
                s = row(y)
                (s.square().sum() + 3 * y.sum()).backward()
                main = ctx.sink.main
                found.append([y, s, x.grad, main[column.weight], main[row.weight]])
            same += [torch.equal(a, c) for a, c in zip(*found, strict=True)]
        space.check()
    return same


@pytest.mark.prove
def test_the_path_over_the_kernels(interpreted):
    """Integers, so that every bit counts; rows of a size that is no multiple of 16 bytes, too."""
    for same in interpreted(4).run(run_path, [(3, 2, 8, 4), (5, 1, 7, 3)]):
        assert all(same) and len(same) == 10
