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

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)


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


def sample(count, size, seed, largest=40, delay=0.0, in_place=True, block=16):
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
            integer=dtype == FP8 or chance.random() < 0.7,
            in_place=in_place and dtype != FP8 and chance.random() < 0.4,
            row_scales=chance.random() < 0.5,
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
            assert error <= limits.get(dtype, 0.0), (dtype, error)


def gather_case(space, case):
    """One epoch of all_gather_matmul, with two weights; return the greatest difference."""
    from mpu.kernels.all_gather_matmul import Scales, all_gather_matmul
    from mpu.kernels.signals import raise_flags

    me, size, (m, n, k), dtype = space.rank, space.size, case["shape"], case["dtype"]
    xs = [draw(space, case, r, m, k) for r in range(size)]
    weights = [draw(space, case, 100 + me, n, k), draw(space, case, 200 + me, k, n).t()]
    want_x, scales, out = torch.cat(xs).double(), None, dtype
    scales_at = -(-m * k * dtype.itemsize // 16) * 16  # they travel behind their rows
    space.begin(scales_at + 4 * m)
    more = dict(in_place=True) if case["in_place"] else {}
    exchange = space.exchange(case["chunk_rows"], **more)
    if dtype == FP8:
        out, rows = torch.bfloat16, m if case["row_scales"] else 1
        x_scales = [powers(space, case, 300 + r, rows) for r in range(size)]
        w_scale = powers(space, case, 400 + me, n if case["row_scales"] else 1)
        tables = exchange.inbox + scales_at, exchange.outbox + scales_at
        scales = Scales(x_scales[me], w_scale, *tables)
        want_x *= torch.cat([s.expand(m) for s in x_scales]).double()[:, None]
    sleep(case, me)
    if case["in_place"]:
        there = space.own((m, k), dtype).fill_(float("nan")).split(case["chunk_rows"])
        for chunk, rows in enumerate(xs[me].split(case["chunk_rows"])):
            if chunk == len(there) - 1:  # a tile may need this one and the one before
                sleep(case, me + 50)
            there[chunk].copy_(rows)
            raise_flags(exchange.raises + chunk * exchange.flag_stride, exchange.epoch)
    worst = 0.0
    for which, w in enumerate(weights):
        push = not case["in_place"] and which == 0
        given = dict(push=push, scales=scales, dtype=out, blocks=blocks_of(case))
        y = all_gather_matmul(xs[me], w, exchange, **given)
        want = want_x @ w.double().t()
        if scales is not None:
            want *= w_scale.double()[None, :]
        worst = max(worst, difference(y, want, case))
    exchange.check()
    space.end()
    return worst


def scatter_case(space, case):
    """One epoch of matmul_reduce_scatter; return the greatest difference."""
    from mpu.kernels.matmul_reduce_scatter import matmul_reduce_scatter

    me, size, (m, n, k), dtype = space.rank, space.size, case["shape"], case["dtype"]
    xs = [draw(space, case, r, size * m, k) for r in range(size)]
    ws = [draw(space, case, 100 + r, n, k) for r in range(size)]
    own = slice(me * m, (me + 1) * m)
    parts = [x[own].double() @ w.double().t() for x, w in zip(xs, ws, strict=True)]
    w = ws[me].t().contiguous().t() if case["seed"] // 1000 % 2 else ws[me]
    scales, out = None, dtype
    if dtype == FP8:
        out = torch.bfloat16
        left = powers(space, case, 300, size * m if case["row_scales"] else 1)
        right = powers(space, case, 400, n if case["row_scales"] else 1)
        factor = left.expand(size * m)[own].double()[:, None] * right.double()[None, :]
        scales, parts = (left, right), [part * factor for part in parts]
    wire = torch.float32 if case["row_scales"] else out
    space.begin(m * n * wire.itemsize)
    exchange = space.exchange(case["chunk_rows"])
    sleep(case, me)
    given = dict(scales=scales, dtype=out, wire=wire, blocks=blocks_of(case))
    got = matmul_reduce_scatter(xs[me], w, exchange, **given)
    total = torch.zeros(m, n, device=space.device)
    for r in range(size):  # in rank order, whoever came when
        total += space.part(r, (m, n), wire)
    assert torch.equal(got, narrowed(total, out)), case
    exchange.check()
    worst = difference(got, sum(parts), case)
    space.end()
    return worst


def draw(space, case, seed, *shape):
    """Return what all ranks draw alike for a seed: -1, 0 and 1, or normally distributed."""
    generator = torch.Generator().manual_seed(case["seed"] + seed)
    if case["integer"]:
        x = torch.randint(-1, 2, shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator)
    return x.to(case["dtype"]).to(space.device)


def powers(space, case, seed, count):
    """Return scales that keep integers exact: a half, one, two."""
    return 2.0 ** draw(space, case | {"dtype": torch.float32}, seed, count)


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
