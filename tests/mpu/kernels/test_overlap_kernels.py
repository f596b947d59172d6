# SPDX-License-Identifier: Apache-2.0
"""The overlap kernels in Triton's interpreter, between processes that share memory.

Each rank is a process (the interpreter patches the language of the whole process) and runs the real
kernels with real flags. Received data is filled with NaN before its slot is given back, so reading
a tile before its flag shows. The interpreter runs programs one after another, so it cannot show
which orders of programs are safe on a GPU.
"""

from datetime import timedelta

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")

from tests.mpu.kernels.cases import check, give_way, matmul_reduce_scatter, run_cases, sample

LINE, CHUNKS = 64, 64
TIMEOUT = timedelta(seconds=60)


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
        self.tickets = torch.zeros(4, dtype=torch.int32)
        self.error = torch.zeros(1, dtype=torch.int32)

    def begin(self, piece_bytes):
        self.piece = -(-piece_bytes // 16) * 16
        self.turn = self.workspace.begin(self.piece * self.size)

    def exchange(self, chunk_rows, epoch=None, patience=20_000_000):
        """The kernels' view of this turn."""
        from mpu.kernels.signals import Exchange

        me, n = self.rank, self.size
        slot = self.turn.part(0, (1,), torch.uint8).data_ptr()
        flags = self.flags.data.data_ptr()

        def table(address):
            return torch.tensor([address(r) for r in range(n)], dtype=torch.int64)

        return Exchange(
            rank=me,
            world=n,
            epoch=torch.tensor([self.turn.epoch if epoch is None else epoch], dtype=torch.int32),
            chunk_rows=chunk_rows,
            inbox=table(lambda r: slot + (me * n + r) * self.piece),
            arrived=table(lambda r: flags + (r * n + me) * CHUNKS * LINE),
            outbox=table(lambda r: slot + (r * n + me) * self.piece),
            raises=table(lambda r: flags + (me * n + r) * CHUNKS * LINE),
            flag_stride=LINE,
            counters=self.counters,
            tickets=self.tickets,
            error=self.error,
            patience=patience,
        )

    def part(self, rank, shape, dtype):
        """What a rank gave to this one."""
        raw = self.turn.part(self.rank, (self.size, self.piece), torch.uint8)[rank]
        return raw[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def end(self, shared=False):
        """Fill this rank's part with NaN (0xff is one in every dtype), then let it go.

        shared: others may still read it.
        """
        if shared:
            self.turn.signal_all()
            self.turn.wait()
        self.turn.part(self.rank, (self.size * self.piece,), torch.uint8).fill_(255)
        self.turn.close()
        assert not self.counters.any() and not self.tickets.any() and not self.error.any()


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


@pytest.mark.prove
@pytest.mark.parametrize(
    ("size", "largest", "delay"), [(2, 24, 0.0), pytest.param(4, 20, 0.05, marks=pytest.mark.prove)]
)
def test_the_kernels_between_processes(interpreted, size, largest, delay):
    check(interpreted(4).run(run, sample(8, size, size, largest, delay)))


@pytest.mark.prove
def test_many_epochs(interpreted):
    size = 3
    cases = sample(60, size, seed=size, largest=36, delay=0.02)
    for start in range(0, len(cases), 20):
        check(interpreted(size).run(run, cases[start : start + 20]))


def take_turns(comm):
    """Let the first program that runs find all work undone, as if no other had an SM."""
    from triton.runtime.interpreter import interpreter_builder

    from mpu.kernels import all_gather_matmul as kernels
    from mpu.kernels.product import Blocks
    from mpu.kernels.tiles import tile_at

    space, done = memory(comm, 2), []
    x, w = torch.arange(320.0).view(40, 8), torch.arange(144.0).view(18, 8)

    def note(index, *rest):
        block_m, block_n = rest[6:8]
        done.append((interpreter_builder.grid_idx[0], int(block_n), int(index)))
        return tile_at(index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "tile_at", note)
        space.begin(x.nbytes)
        y = kernels.all_gather_matmul(
            x, w, space.exchange(16), blocks=Blocks(16, 16, 16, group=2, programs=5)
        )
        space.end()
    assert torch.equal(y[40 * space.rank :][:40], x @ w.t()) and y.shape == (80, 18)
    return done


def test_a_pusher_multiplies_when_it_has_pushed(interpreted):
    """Tickets are taken in the order of tiles.py; no tile waits for a program without an SM."""
    pushes, tiles = [(0, 1, i) for i in range(3)], [(0, 16, i) for i in range(12)]
    for done in interpreted(4).run(take_turns):
        assert done == pushes + tiles


def late_rank(space, exchange):
    """Return the error that names the late rank, and clear it."""
    with pytest.raises(TimeoutError) as late:
        exchange.check()
    space.error.zero_()
    return str(late.value)


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
        said = late_rank(space, exchange)
    space.end(shared=True)
    return said


def run_out_in_a_sum(comm):
    """Rank 1 sends no parts: rank 0 waits for all at once, names it, and its rows are NaN."""
    space, said = memory(comm, 2), ""
    x, w = torch.ones(10, 8), torch.ones(3, 8)
    space.begin(5 * 3 * x.itemsize)
    exchange = space.exchange(chunk_rows=5, patience=20)
    if space.rank == 0:
        assert matmul_reduce_scatter(x, w, exchange).isnan().all()
        said = late_rank(space, exchange)
    space.end(shared=True)
    return said


@pytest.mark.parametrize("case", [run_out, run_out_in_a_sum])
def test_a_wait_that_runs_out(interpreted, case):
    said = interpreted(4).run(case)
    assert said[0] == "rank 1 of the 2 did not raise its flag in time" and not said[1]


def wrap(comm):
    """Flags count past 2**31 and 2**32."""
    space = memory(comm, 2)
    x, w = torch.arange(80.0).view(10, 8), torch.ones(3, 8)
    for start in (2**31, 2**32):
        space.flags.barrier()
        space.flags.data.view(torch.int32).fill_(signed(start - 2))
        space.flags.barrier()
        for step in range(-1, 2):
            space.begin(5 * 3 * 4)
            got = matmul_reduce_scatter(x, w, space.exchange(5, epoch=signed(start + step)))
            assert torch.equal(got, 2 * (x @ w.t())[space.rank * 5 : space.rank * 5 + 5])
            space.end()
    space.flags.barrier()
    space.flags.data.zero_()
    space.flags.barrier()


def signed(epoch):
    """Return the epoch as the int32 with the same low 32 bits."""
    return (epoch + 2**31) % 2**32 - 2**31


@pytest.mark.prove
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
