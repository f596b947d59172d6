# SPDX-License-Identifier: Apache-2.0
"""The cases of the overlap kernels, run on every rank, in the interpreter and on GPUs alike.

A case is one epoch: a shape, a dtype, a chunk size, late ranks. Each rank draws all ranks' inputs
and compares with float64; integers must be equal bit for bit. `space` is the ranks' memory. It has
rank, size, device, begin(bytes from a rank to a rank), exchange(chunk_rows), part(rank, shape,
dtype), which is what that rank gave to this one, and end().
"""

import random
import time

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def give_way():
    """Let a rank that polls sleep in between, once a process: there are more ranks than cores."""
    from triton.runtime.interpreter import InterpreterBuilder

    atomic = InterpreterBuilder.create_atomic_rmw
    if atomic.__name__ == "sleepy":
        return

    def sleepy(builder, op, pointer, value, mask, sem, scope):
        if sem.name == "ACQUIRE":
            time.sleep(1e-4)
        return atomic(builder, op, pointer, value, mask, sem, scope)

    InterpreterBuilder.create_atomic_rmw = sleepy


class Turns:
    """mpu/comm/symmetric_cuda.py as a space."""

    def __init__(self, workspace):
        self.workspace, self.device = workspace, workspace.device
        self.rank, self.size = workspace.axis.rank, workspace.axis.size

    def begin(self, piece_bytes):
        self.turn = self.workspace.begin(piece_bytes)

    def exchange(self, chunk_rows):
        return self.turn.exchange(chunk_rows)

    def part(self, rank, shape, dtype):
        return self.turn.part(rank, shape, dtype)

    def end(self):
        for rank in range(self.size):  # 0xff is NaN in every dtype
            self.part(rank, (self.turn.piece,), torch.uint8).fill_(255)
        self.turn.close()
        self.workspace.check()
        assert not self.workspace.counters.any() and not self.workspace.tickets.any()


def sample(count, size, seed, largest=40, delay=0.0, block=16):
    """Draw cases: ragged shapes, chunks that no tile size divides, every dtype in turn."""
    chance = random.Random(seed)
    cases = []
    for index in range(count):
        tma = chance.random() < 0.3
        m, n, k = (chance.randint(1, largest) for _ in range(3))
        if tma:  # which takes rows of a multiple of 16 bytes
            n, k = -(-n // 16) * 16, -(-k // 16) * 16
        dtype = DTYPES[index % len(DTYPES)]
        case = dict(size=size, shape=(m, n, k), tma=tma, seed=1000 * index, delay=delay)
        case |= dict(
            verb=("gather", "scatter")[index // len(DTYPES) % 2],
            dtype=dtype,
            integer=chance.random() < 0.7,
            rows=chance.random() < 0.5,
            chunk_rows=chance.choice(
                [m, 16, max(1, m // 3), max(chance.randint(1, m), -(-m // 60))]
            ),
            programs=chance.randint(1, 4),
            block=block,
        )
        cases.append(case)
    return cases


def run_cases(space, cases):
    """Run the cases; return the worst relative difference of the random ones by dtype."""
    worst = {}
    for case in cases:
        run = gather_case if case["verb"] == "gather" else scatter_case
        name = str(case["dtype"])
        worst[name] = max(worst.get(name, 0.0), run(space, case))
    return worst


def check(results):
    """Hold what run_cases returned on every rank to what the dtypes allow."""
    limits = {"torch.float32": 1e-6, "torch.float16": 2e-3, "torch.bfloat16": 1.2e-2}
    for worst in results:
        for dtype, error in worst.items():
            assert error <= limits[dtype], (dtype, error)


def gather_case(space, case):
    """One epoch of all_gather_matmul; return the greatest difference."""
    from mpu.kernels.all_gather_matmul import all_gather_matmul

    me, size, (m, n, k) = space.rank, space.size, case["shape"]
    xs, w = [draw(space, case, r, m, k) for r in range(size)], draw(space, case, 100 + me, n, k)
    space.begin(m * k * w.itemsize)
    exchange = space.exchange(case["chunk_rows"])
    sleep(case, me)
    y = all_gather_matmul(xs[me], laid_out(w, case), exchange, blocks=blocks_of(case))
    worst = difference(y, torch.cat(xs).double() @ w.double().t(), case)
    exchange.check()
    space.end()
    return worst


def scatter_case(space, case):
    """One epoch of both launches of a sum; return the greatest difference."""
    me, size, (m, n, k) = space.rank, space.size, case["shape"]
    xs = [draw(space, case, r, size * m, k) for r in range(size)]
    ws = [draw(space, case, 100 + r, n, k) for r in range(size)]
    own = slice(me * m, (me + 1) * m)
    parts = [x[own].double() @ w.double().t() for x, w in zip(xs, ws, strict=True)]
    space.begin(m * n * case["dtype"].itemsize)
    exchange = space.exchange(case["chunk_rows"])
    sleep(case, me)
    got = matmul_reduce_scatter(xs[me], laid_out(ws[me], case), exchange, blocks_of(case))
    total = torch.zeros(m, n, device=space.device)
    for r in range(size):  # in rank order, whoever came when
        total += space.part(r, (m, n), case["dtype"])
    assert torch.equal(got, narrowed(total, case["dtype"])), case
    exchange.check()
    worst = difference(got, sum(parts), case)
    space.end()
    return worst


def matmul_reduce_scatter(x, w, exchange, blocks=None):
    """Both launches of mpu/kernels/matmul_reduce_scatter.py; return this rank's rows of the sum."""
    from mpu.kernels.matmul_reduce_scatter import add_parts, matmul_scatter

    matmul_scatter(x, w, exchange, blocks=blocks)
    out = x.new_empty(x.shape[0] // exchange.world, w.shape[0])
    add_parts(out, exchange, programs=blocks and blocks.programs)
    return out


def laid_out(w, case):
    """Return the weight with its rows contiguous, or its columns."""
    return w if case["rows"] else w.t().contiguous().t()


def draw(space, case, seed, *shape):
    """Return what all ranks draw alike for a seed: -1, 0 and 1, or normally distributed."""
    generator = torch.Generator().manual_seed(case["seed"] + seed)
    if case["integer"]:
        x = torch.randint(-1, 2, shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator)
    return x.to(case["dtype"]).to(space.device)


def sleep(case, rank):
    if case["delay"]:
        time.sleep(random.Random(case["seed"] + rank).random() * case["delay"])


def blocks_of(case):
    """Return small tiles and few programs, or None for those of real use."""
    from mpu.kernels.product import Blocks

    side = case["block"]
    if side is None:
        return None
    return Blocks(side, side, side, group=2, programs=case["programs"], tma=case["tma"])


def narrowed(x, dtype):
    """Round as the kernels do; the interpreter rounds to bfloat16 towards zero."""
    if dtype == torch.bfloat16 and x.device.type == "cpu":
        x = (x.view(torch.int32) & -65536).view(torch.float32)
    return x.to(dtype)


def difference(got, want, case):
    """Return the relative difference; of integers there may be none."""
    assert got.shape == want.shape
    if case["integer"]:
        assert torch.equal(got, want.to(got.dtype)), case
        return 0.0
    assert torch.isfinite(got).all(), case
    return float((got.double() - want).norm() / want.norm())
