# SPDX-License-Identifier: Apache-2.0
"""The overlap kernels in Triton's interpreter, between processes that share memory.

Each rank is a process (the interpreter patches the language of the whole process) and runs the real
kernels with real flags. Integers come out bit for bit as in float64. What was received is filled
with NaN before its slot is given back, so a tile read before its flag shows. The interpreter runs
one program after the other: which orders of programs are safe on a GPU it does not say. It rounds
float32 to bfloat16 towards zero, and so does what is expected here.
"""

import os
import random
import time
from datetime import timedelta

import pytest
import torch

pytest.importorskip("triton", reason="this platform has no triton")

from mpu import native
from tests.conftest import World

LINE, CHUNKS = 64, 64
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)


@pytest.fixture(scope="module")
def interpreted():
    """interpreted(n) -> a world of n ranks whose triton is the interpreter."""
    if native.load() is None:
        pytest.skip(native.reason())
    worlds = {}

    def get(size):
        if size not in worlds or worlds[size].broken:
            before = os.environ.get("TRITON_INTERPRET")
            os.environ["TRITON_INTERPRET"] = "1"
            try:
                worlds[size] = World(size)
            finally:
                del os.environ["TRITON_INTERPRET"]
                if before is not None:
                    os.environ["TRITON_INTERPRET"] = before
        return worlds[size]

    yield get
    for world in worlds.values():
        world.close()


class Memory:
    """Shared memory of a tp axis: the data of mpu.comm.workspace, and flags for chunks."""

    def __init__(self, comm, size):
        from mpu.comm.symmetric import SymmetricBuffer
        from mpu.comm.workspace import Workspace

        self.axis, self.size = comm.grid(tp=size).tp, size
        self.rank = self.axis.rank
        self.workspace = Workspace(self.axis, timedelta(seconds=60))
        self.flags = SymmetricBuffer(self.axis, size * size * CHUNKS * LINE, timedelta(seconds=60))
        self.counters = torch.zeros(size * CHUNKS, dtype=torch.int32)
        self.error = torch.zeros(1, dtype=torch.int32)

    def begin(self, piece_bytes):
        self.piece = -(-piece_bytes // 16) * 16
        self.turn = self.workspace.begin(self.piece * self.size)
        self.slot = self.turn.slot.data_ptr()

    def _table(self, address):
        return torch.tensor([address(r) for r in range(self.size)], dtype=torch.int64)

    def pieces(self, of):
        """Where rank `of` finds what each rank gives it."""
        return self._table(lambda r: self.slot + (of * self.size + r) * self.piece)

    def exchange(self, chunk_rows, in_place=False, epoch=None, patience=20_000_000):
        """The kernels' view of this turn. in_place: every rank's rows stay in its own part."""
        from mpu.kernels.signals import Exchange

        def flag(src, dst):
            return self.flags.data.data_ptr() + (src * self.size + dst) * CHUNKS * LINE

        me, n = self.rank, self.size
        own = self._table(lambda r: self.slot + r * n * self.piece)
        return Exchange(
            rank=me,
            world=n,
            epoch=self.turn.epoch if epoch is None else epoch,
            chunk_rows=chunk_rows,
            inbox=own if in_place else self.pieces(me),
            arrived=self._table(lambda r: flag(r, me)),
            outbox=self._table(lambda r: self.slot + (r * n + me) * self.piece),
            raises=self._table(lambda r: flag(me, r)),
            flag_stride=LINE,
            counters=self.counters,
            error=self.error,
            patience=patience,
        )

    def mine(self, shape, dtype):
        """All pieces given to this rank, [size, *shape]."""
        raw = self.turn.part(self.rank, (self.size, self.piece), torch.uint8)
        count = torch.Size(shape).numel() * dtype.itemsize
        return torch.stack([row[:count].clone().view(dtype).view(shape) for row in raw])

    def end(self):
        """Fill what this rank was given with NaN (0xff is one in every dtype), then let it go."""
        self.turn.part(self.rank, (self.size * self.piece,), torch.uint8).fill_(255)
        self.turn.close()
        assert not self.counters.any() and not self.error.any()


def memory(comm, size):
    kept = comm.__dict__.setdefault("memories", {})
    if size not in kept:
        kept[size] = Memory(comm, size)
    return kept[size]


def draw(seed, *shape, dtype=torch.float32, integer=True):
    generator = torch.Generator().manual_seed(seed)
    if integer:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def sleep(case, rank):
    if case["delay"]:
        time.sleep(random.Random(hash((case["seed"], rank))).random() * case["delay"])


def blocks_of(case):
    from mpu.kernels.product import Blocks

    return Blocks(16, 16, 16, group=2, programs=case["programs"], tma=case["tma"])


def gather_case(comm, case):
    """One epoch of all_gather_matmul, with one weight or two; return the greatest difference."""
    from mpu.kernels.all_gather_matmul import Scales, all_gather_matmul
    from mpu.kernels.signals import raise_flags

    space = memory(comm, case["size"])
    me, (m, n, k), dtype = space.rank, case["shape"], case["dtype"]
    make = dict(dtype=dtype, integer=case["integer"])
    xs = [draw(case["seed"] + r, m, k, **make) for r in range(space.size)]
    weights = [draw(case["seed"] + 100 + me, n, k, **make)]
    weights.append(draw(case["seed"] + 200 + me, k, n, **make).t())
    scaled, out = dtype == FP8, torch.bfloat16 if dtype == FP8 else dtype
    space.begin((m * k * dtype.itemsize + 15) // 16 * 16 + 4 * m)
    in_place = case["in_place"] and not scaled
    exchange, scales = space.exchange(case["chunk_rows"], in_place), None
    sleep(case, me)
    want_x = torch.cat(xs).double()
    if scaled:
        behind = (m * k + 15) // 16 * 16
        rows = m if case["row_scales"] else 1
        x_scales = [2.0 ** draw(case["seed"] + 300 + r, rows) for r in range(space.size)]
        w_scale = 2.0 ** draw(case["seed"] + 400 + me, n if case["row_scales"] else 1)
        scales = Scales(x_scales[me], w_scale, exchange.inbox + behind, exchange.outbox + behind)
        want_x *= torch.cat([s.expand(m) for s in x_scales]).double()[:, None]
    if in_place:
        space.turn.part(me, (m, k), dtype).copy_(xs[me])
        for chunk in range(exchange.chunks(m)):
            raise_flags(exchange.raises + chunk * LINE, exchange.epoch)
        sleep(case, me + 50)
    worst = 0.0
    for which, w in enumerate(weights):
        push = not in_place and which == 0
        y = all_gather_matmul(
            xs[me], w, exchange, push=push, scales=scales, dtype=out, blocks=blocks_of(case)
        )
        exchange.check()
        want = want_x @ w.double().t()
        if scaled:
            want *= w_scale.double()[None, :]
        assert y.dtype == out and y.shape == want.shape
        worst = max(worst, difference(y, want, case))
    if in_place:  # the part is this rank's, but others may still read it
        space.turn.signal_all()
        space.turn.wait()
    space.end()
    return worst


def scatter_case(comm, case):
    """One epoch of matmul_reduce_scatter; return the greatest difference."""
    from mpu.kernels.matmul_reduce_scatter import matmul_reduce_scatter

    space = memory(comm, case["size"])
    me, size, (m, n, k), dtype = space.rank, case["size"], case["shape"], case["dtype"]
    make = dict(dtype=dtype, integer=case["integer"])
    xs = [draw(case["seed"] + r, size * m, k, **make) for r in range(size)]
    ws = [draw(case["seed"] + 100 + r, n, k, **make) for r in range(size)]
    scaled, out = dtype == FP8, torch.bfloat16 if dtype == FP8 else dtype
    wire = torch.float32 if case["row_scales"] else out
    space.begin(m * n * wire.itemsize)
    exchange, scales = space.exchange(case["chunk_rows"]), None
    sleep(case, me)
    w = ws[me].t().contiguous().t() if case["seed"] % 2 else ws[me]
    parts = [x.double() @ w.double().t() for x, w in zip(xs, ws, strict=True)]
    if scaled:
        left = 2.0 ** draw(case["seed"] + 300, size * m if case["row_scales"] else 1)
        right = 2.0 ** draw(case["seed"] + 400, n if case["row_scales"] else 1)
        scales, factor = (left, right), left.double()[:, None] * right.double()[None, :]
        parts = [part * factor for part in parts]
    given = dict(scales=scales, dtype=out, wire=wire, blocks=blocks_of(case))
    got = matmul_reduce_scatter(xs[me], w, exchange, **given)
    exchange.check()
    total = torch.zeros(m, n)
    for part in space.mine((m, n), wire):  # in rank order, whoever came when
        total += part
    assert torch.equal(got, narrowed(total, out))
    worst = difference(got, sum(parts)[me * m : (me + 1) * m], case)
    space.end()
    return worst


def narrowed(x, dtype):
    """Round as the interpreter does."""
    towards_zero = (x.view(torch.int32) & -65536).view(torch.float32)
    return (towards_zero if dtype == torch.bfloat16 else x).to(dtype)


def difference(got, want, case):
    if case["integer"]:
        assert torch.equal(got, want.to(got.dtype)), case
        return 0.0
    assert torch.isfinite(got).all(), case
    return float((got.double() - want).norm() / want.norm())


def run_cases(comm, cases):
    """Run the cases; return the worst relative difference of the random ones by dtype."""
    worst = {}
    for case in cases:
        run = gather_case if case["verb"] == "gather" else scatter_case
        name = str(case["dtype"])
        worst[name] = max(worst.get(name, 0.0), run(comm, case))
    return worst


def sample(count, size, seed, largest=40, delay=0.0):
    """Draw cases: ragged shapes, chunks that no tile size divides, every dtype in turn."""
    chance = random.Random(seed)
    cases = []
    for index in range(count):
        tma = chance.random() < 0.3
        m, n, k = (chance.randint(1, largest) for _ in range(3))
        if tma:  # what choose_blocks asks of it: rows of a multiple of 16 bytes
            n, k = -(-n // 16) * 16, -(-k // 16) * 16
        cases.append(
            dict(
                verb=("gather", "scatter")[index // len(DTYPES) % 2],
                dtype=DTYPES[index % len(DTYPES)],
                integer=DTYPES[index % len(DTYPES)] == FP8 or chance.random() < 0.7,
                in_place=chance.random() < 0.4,
                row_scales=chance.random() < 0.5,
                chunk_rows=chance.choice([m, 16, max(1, m // 3), chance.randint(1, m)]),
                programs=chance.randint(1, 4),
                **dict(size=size, shape=(m, n, k), tma=tma, seed=1000 * index, delay=delay),
            )
        )
    return cases


def check(results):
    limits = {"torch.float32": 1e-6, "torch.float16": 2e-3, "torch.bfloat16": 1.2e-2}
    for worst in results:
        for dtype, error in worst.items():
            assert error <= limits.get(dtype, 0.0), (dtype, error)


@pytest.mark.parametrize("size", [2, 4])
def test_the_kernels_between_processes(interpreted, size):
    check(interpreted(4).run(run_cases, sample(8, size, seed=size)))


def test_late_ranks(interpreted):
    check(interpreted(4).run(run_cases, sample(8, 4, seed=5, largest=20, delay=0.1)))


@pytest.mark.prove
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_hundreds_of_epochs(interpreted, size):
    check(interpreted(size).run(run_cases, sample(200, size, seed=size, largest=50, delay=0.02)))


def run_out(comm):
    """Rank 1 never pushes: rank 0's wait runs out, names it, and its tiles are NaN."""
    from mpu.kernels.all_gather_matmul import all_gather_matmul

    space = memory(comm, 2)
    x, w = draw(0, 5, 8), draw(1, 3, 8)
    space.begin(x.nbytes)
    exchange, said = space.exchange(chunk_rows=5, patience=20), ""
    if space.rank == 0:
        y = all_gather_matmul(x, w, exchange)
        own, theirs = torch.equal(y[:5], x @ w.t()), y[5:].isnan().all()
        assert own and theirs
        try:
            exchange.check()
        except TimeoutError as error:
            said = str(error)
        space.error.zero_()
    space.turn.signal_all()
    space.turn.wait()
    space.end()
    return said


def test_a_wait_that_runs_out(interpreted):
    said = interpreted(4).run(run_out)
    assert said[0] == "rank 1 of the 2 did not raise its flag in time" and not said[1]


def wrap(comm):
    """Flags count past 2**31 and 2**32."""
    from mpu.kernels.matmul_reduce_scatter import matmul_reduce_scatter

    space = memory(comm, 2)
    x, w = draw(0, 10, 8), draw(1, 3, 8)
    for start in (2**31, 2**32):
        raised = (start - 3 + 2**31) % 2**32 - 2**31
        space.flags.data.view(torch.int32).fill_(raised)
        space.turn = None
        for step in range(-2, 3):
            space.begin(5 * 3 * 4)
            got = matmul_reduce_scatter(x, w, space.exchange(5, epoch=start + step))
            assert torch.equal(got, 2 * (x @ w.t())[space.rank * 5 : space.rank * 5 + 5])
            space.end()
    space.flags.barrier()
    space.flags.data.zero_()
    space.flags.barrier()


def test_epochs_wrap_round(interpreted):
    interpreted(4).run(wrap)


def refuse(comm):
    from mpu.kernels.signals import check_device

    try:
        check_device(torch.zeros(1, dtype=torch.float64))
    except ValueError as error:
        return str(error)


def test_what_the_kernels_do_not_take(interpreted):
    from mpu.kernels.signals import INTERPRETED, check_device

    assert "float64" in interpreted(4).run(refuse)[0]
    if not INTERPRETED:
        with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
            check_device(torch.zeros(1))
