# SPDX-License-Identifier: Apache-2.0
"""The overlap kernels in Triton's interpreter, between processes that share memory.

Each rank is a process (the interpreter patches the language of the whole process) and runs the real
kernels with real flags. Received data is filled with NaN before its slot is given back, so reading
a tile before its flag shows. The interpreter runs programs one after another, so it cannot show
which orders of programs are safe on a GPU.
"""

import time
from datetime import timedelta

import pytest
import torch

pytest.importorskip(
    "triton", "3.7", reason="no triton, or one before 3.7, whose interpreter fails on numpy 2.4"
)

from mpu import native
from tests.conftest import World
from tests.mpu.kernels.cases import Turns, check, run_cases, sample

LINE, CHUNKS = 64, 64
TIMEOUT = timedelta(seconds=60)


@pytest.fixture(scope="module")
def interpreted():
    """interpreted(n) -> a world of n ranks whose triton is the interpreter."""
    if native.load() is None:
        pytest.skip(native.reason())
    worlds = {}

    def get(size):
        if size not in worlds or worlds[size].broken:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRITON_INTERPRET", "1")
                worlds[size] = World(size)
        return worlds[size]

    yield get
    for world in worlds.values():
        world.close()


def give_way():
    """Let a rank that polls sleep in between: there are more ranks than cores."""
    from triton.runtime.interpreter import InterpreterBuilder

    atomic = InterpreterBuilder.create_atomic_rmw

    def sleepy(*args):
        time.sleep(1e-4)
        return atomic(*args)

    InterpreterBuilder.create_atomic_rmw = sleepy


class Memory:
    """Shared memory of a tp axis: the data of mpu/comm/workspace.py, and flags for chunks.

    Part d of a slot is what rank d is given, a piece from each rank.
    """

    device = torch.device("cpu")

    def __init__(self, comm, size):
        from mpu.comm.symmetric import SymmetricBuffer
        from mpu.comm.workspace import Workspace

        self.axis, self.size = comm.grid(tp=size).tp, size
        self.rank = self.axis.rank
        self.workspace = Workspace(self.axis, TIMEOUT)
        self.flags = SymmetricBuffer(self.axis, size * size * CHUNKS * LINE, TIMEOUT)
        self.counters = torch.zeros(size * CHUNKS, dtype=torch.int32)
        self.error = torch.zeros(1, dtype=torch.int32)

    def begin(self, piece_bytes):
        self.piece, self.shared = -(-piece_bytes // 16) * 16, False
        self.turn = self.workspace.begin(self.piece * self.size)

    def exchange(self, chunk_rows, in_place=False, epoch=None, patience=20_000_000):
        """The kernels' view of this turn. in_place: a rank's rows stay in its own part."""
        from mpu.kernels.signals import Exchange

        me, n, self.shared = self.rank, self.size, in_place
        slot, flags = self.turn.slot.data_ptr(), self.flags.data.data_ptr()

        def table(address):
            return torch.tensor([address(r) for r in range(n)], dtype=torch.int64)

        return Exchange(
            rank=me,
            world=n,
            epoch=self.turn.epoch if epoch is None else epoch,
            chunk_rows=chunk_rows,
            inbox=table(lambda r: slot + (r * n if in_place else me * n + r) * self.piece),
            arrived=table(lambda r: flags + (r * n + me) * CHUNKS * LINE),
            outbox=table(lambda r: slot + (r * n + me) * self.piece),
            raises=table(lambda r: flags + (me * n + r) * CHUNKS * LINE),
            flag_stride=LINE,
            counters=self.counters,
            error=self.error,
            patience=patience,
        )

    def own(self, shape, dtype):
        """Where this rank's rows lie for all to read."""
        return self.turn.part(self.rank, shape, dtype)

    def part(self, rank, shape, dtype):
        """What a rank gave to this one."""
        raw = self.turn.part(self.rank, (self.size, self.piece), torch.uint8)[rank]
        return raw[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def end(self):
        """Fill this rank's part with NaN (0xff is one in every dtype), then let it go."""
        if self.shared:  # others may still read it
            self.turn.signal_all()
            self.turn.wait()
        self.turn.part(self.rank, (self.size * self.piece,), torch.uint8).fill_(255)
        self.turn.close()
        assert not self.counters.any() and not self.error.any()


def memory(comm, size):
    if not hasattr(comm, "memories"):
        comm.memories = {}
        give_way()
    kept = comm.memories
    if size not in kept:
        kept[size] = Memory(comm, size)
    return kept[size]


def run(comm, cases):
    return run_cases(memory(comm, cases[0]["size"]), cases)


@pytest.mark.parametrize(
    ("size", "largest", "delay"), [(2, 28, 0.0), pytest.param(4, 20, 0.05, marks=pytest.mark.prove)]
)
def test_the_kernels_between_processes(interpreted, size, largest, delay):
    check(interpreted(4).run(run, sample(8, size, size, largest, delay)))


@pytest.mark.prove
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_hundreds_of_epochs(interpreted, size):
    cases = sample(240, size, seed=size, largest=36 if size < 8 else 20, delay=0.02)
    for start in range(0, len(cases), 20):
        check(interpreted(size).run(run, cases[start : start + 20]))


class SharedByAll:
    """torch's symmetric memory, played by memory of the host: a stretch of it for each rank."""

    def __init__(self, axis):
        self.axis = axis

    def empty(self, nbytes, dtype, device):
        from mpu.comm.symmetric import SymmetricBuffer

        nbytes = -(-nbytes // 4096) * 4096
        self.all = SymmetricBuffer(self.axis, self.axis.size * nbytes, TIMEOUT).data
        self.buffer_ptrs = [self.all.data_ptr() + r * nbytes for r in range(self.axis.size)]
        return self.all[self.axis.rank * nbytes :][:nbytes].fill_(255)

    def rendezvous(self, memory, group):
        return self


def gpu_workspace(comm, patch):
    """Make mpu/comm/symmetric_cuda.py's workspace, but for the GPU; return it with its axis."""
    from mpu.comm import symmetric_cuda

    axis = comm.grid(tp=comm.size).tp
    patch.setattr(symmetric_cuda, "symmetric_memory", SharedByAll(axis))
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
    return symmetric_cuda.CudaWorkspace(axis, torch.device("cpu"), TIMEOUT), axis


def run_turns(comm, cases):
    """Run cases through the turns of GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        space = Turns(gpu_workspace(comm, patch)[0])
        worst = run_cases(space, cases)
        space.begin(3 << 20)  # the slots grow, and epochs begin anew
        space.end()
        assert space.workspace.slot_bytes >= 12 << 20 and space.workspace.epoch == 1
        worst |= run_cases(space, cases[:3])
    return worst


def test_the_turns_of_gpus(interpreted):
    cases = sample(8, 4, seed=6, largest=20, in_place=False)
    check(interpreted(4).run(run_turns, cases))


def run_path(comm, shapes):
    """Run a column and a row layer and all gradients over the kernels and by `none`."""
    import copy
    from dataclasses import replace

    from mpu.comm.collectives import group_of
    from mpu.comm.overlap_map import OverlapMap
    from mpu.comm.symmetric_cuda import CudaSymmetricTransport
    from mpu.context import LayerContext
    from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear, use_overlap

    give_way()
    same = []
    with pytest.MonkeyPatch.context() as patch:
        space, axis = gpu_workspace(comm, patch)
        grid = copy.copy(comm.grid(tp=comm.size))
        grid.tp = replace(axis, transport=CudaSymmetricTransport(group_of(axis), space))
        for seed, (n, b, k, o) in enumerate(shapes):
            found = []
            for mode in ("none", "symmetric"):
                random = torch.Generator().manual_seed(100 * seed + comm.rank)

                def draw(*shape, random=random):
                    return torch.randint(-2, 3, shape, generator=random).float()

                ctx = LayerContext(grid, True)
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


def test_the_path_over_the_kernels(interpreted):
    """Integers, so that every bit counts; rows of a size that is no multiple of 16 bytes, too."""
    for same in interpreted(4).run(run_path, [(3, 2, 8, 4), (5, 1, 7, 3)]):
        assert all(same) and len(same) == 10


def run_out(comm):
    """Rank 1 never pushes: rank 0's wait runs out, names it, and its tiles are NaN."""
    from mpu.kernels.all_gather_matmul import all_gather_matmul

    space, said = memory(comm, 2), ""
    x, w = torch.arange(40.0).view(5, 8), torch.ones(3, 8)
    space.begin(x.nbytes)
    exchange = space.exchange(chunk_rows=5, patience=20)
    if space.rank == 0:
        space.part(1, (5, 8), x.dtype).zero_()
        y = all_gather_matmul(x, w, exchange)
        assert torch.equal(y[:5], x @ w.t()) and y[5:].isnan().all()
        with pytest.raises(TimeoutError) as late:
            exchange.check()
        said = str(late.value)
        space.error.zero_()
    space.shared = True
    space.end()
    return said


def test_a_wait_that_runs_out(interpreted):
    said = interpreted(4).run(run_out)
    assert said[0] == "rank 1 of the 2 did not raise its flag in time" and not said[1]


def wrap(comm):
    """Flags count past 2**31 and 2**32."""
    from mpu.kernels.matmul_reduce_scatter import matmul_reduce_scatter
    from mpu.kernels.signals import signed

    space = memory(comm, 2)
    x, w = torch.arange(80.0).view(10, 8), torch.ones(3, 8)
    for start in (2**31, 2**32):
        space.flags.barrier()
        space.flags.data.view(torch.int32).fill_(signed(start - 2))
        space.flags.barrier()
        for step in range(-1, 2):
            space.begin(5 * 3 * 4)
            got = matmul_reduce_scatter(x, w, space.exchange(5, epoch=start + step))
            assert torch.equal(got, 2 * (x @ w.t())[space.rank * 5 : space.rank * 5 + 5])
            space.end()
    space.flags.barrier()
    space.flags.data.zero_()
    space.flags.barrier()


def test_epochs_wrap_round(interpreted):
    interpreted(4).run(wrap)


def test_what_the_kernels_do_not_take():
    from mpu.kernels.signals import check_device

    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        check_device(torch.zeros(1))


def refused(comm):
    from mpu.kernels.signals import check_device

    with pytest.raises(ValueError, match="float64"):
        check_device(torch.zeros(1, dtype=torch.float64))


def test_float64_is_refused(interpreted):
    interpreted(4).run(refused)
