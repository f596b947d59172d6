# SPDX-License-Identifier: Apache-2.0
"""Multiply, then sum each rank's own rows over the ranks: out = sum over ranks of (x w^T)[rows].

Two launches. The first multiplies, rows of remote owners first, stores each tile in its owner's
memory, and raises a flag for each chunk of rows. It never waits, and its tiles are taken by running
programs (tickets.py), so one SM is enough for all its flags to rise. The second adds:

    rank 1 of 3, chunks a b       time ->
    programs   2a 2b | 0a 0b | 1a 1b              row tiles; the last tile of a chunk
    flags         2a 2b   0a 0b                   raises its flag at the owner
    add                            1a: 0 + 1 + 2  waits for 1a of ranks 0 and 2
                                   1b: 0 + 1 + 2

A rank sends in the dtype of the result. Its own part is also stored in that dtype, so that all
contributions are treated alike. They are added in rank order, in fp32, and rounded once: the bits
do not depend on which rank was late.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels import tiles
from mpu.kernels.declared import Cost, declared
from mpu.kernels.product import (
    Blocks,
    choose_blocks,
    constants,
    count_sms,
    open_rows,
    open_weight,
    tile_product,
)
from mpu.kernels.signals import (
    Exchange,
    check_device,
    chunks_of_tile,
    compiled,
    raise_flag,
    tile_done,
    wait_all,
)
from mpu.kernels.tickets import MULTIPLIED, leave, take

REDUCE_ROWS, REDUCE_COLUMNS = 8, 256
REDUCE_PROGRAMS = 4  # per SM: they hide each other's memory latency
BATCH = tl.constexpr(8)  # ranks whose parts are read before the first is added
tile_at = compiled(tiles.tile_at)
tile_count = compiled(tiles.tile_count)


def scatter_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: all ranks' rows are multiplied, and written to their owners' memory."""
    m, n, k, world, size = a["m"], a["n"], a["k"], a["WORLD"], a["x"].element_size()
    return Cost((world * m * k + n * k + world * m * n) * size, 2.0 * world * m * n * k)


def reduce_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: the parts of all ranks are read and their sum is written."""
    moved = a["m"] * a["n"] * (a["WORLD"] + 1) * a["out"].element_size()
    return Cost(moved, 0.0, ("out",))


@declared(scatter_cost, x="whole aligned", w="same")
@triton.jit(do_not_specialize=["rank", "epoch"])
def matmul_scatter_kernel(
    x, w, outbox, raises, counters, tickets, m, n, k, stride_n, stride_k, chunk_rows, flag_stride,
    chunks, rank, epoch, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr,
    DOT_F32: tl.constexpr, PRECISION: tl.constexpr, RAISE: tl.constexpr,
):  # fmt: skip
    """Multiply x [WORLD m, k] by w [n, k] (strides); write rows of rank d to outbox[d], [m, n]."""
    xs = open_rows(x, WORLD * m, k, BLOCK_M, BLOCK_K, TMA)
    weight = open_weight(w, n, k, stride_n, stride_k, BLOCK_N, BLOCK_K, ROWS, TMA)
    now = tl.load(epoch)
    total = tile_count(WORLD, m, n, BLOCK_M, BLOCK_N)
    index = take(tickets, MULTIPLIED)
    while index < total:
        owner, i, j = tile_at(index, rank, 1, 1, WORLD, m, n, BLOCK_M, BLOCK_N, GROUP)
        first = owner * m
        product = tile_product(
            xs, weight, first + i * BLOCK_M, first + m, j * BLOCK_N, n, k, stride_n, stride_k,
            BLOCK_M, BLOCK_N, BLOCK_K, ROWS, TMA, DOT_F32, PRECISION,
        )  # fmt: skip
        rows = (i * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
        part = tl.multiple_of(tl.load(outbox + owner).to(x.dtype), 16)
        place = part + rows[:, None] * n + columns[None, :]
        mask = (rows < m)[:, None] & (columns < n)[None, :]
        tl.store(place, product.to(x.dtype.element_ty), mask)
        if owner != rank:
            tile_done(
                raises, counters, owner, i, m, tl.cdiv(n, BLOCK_N), BLOCK_M, chunk_rows,
                flag_stride, chunks, now, RAISE,
            )  # fmt: skip
        index = take(tickets, MULTIPLIED)
    leave(tickets)


@declared(reduce_cost, out="whole")
@triton.jit(do_not_specialize=["rank", "epoch", "patience"])
def reduce_kernel(
    inbox, arrived, out, error, m, n, chunk_rows, flag_stride, rank, epoch, patience,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out [m, n] = sum over r, in order, of inbox[r], [m, n].

    A program waits once per chunk, for all ranks together.
    """
    error = error.to(tl.int64).to(tl.pointer_type(tl.int32))
    now = tl.load(epoch)
    came, waited = True, 0
    for index in range(tl.program_id(0), tile_count(1, m, n, BLOCK_M, BLOCK_N), tl.num_programs(0)):
        _, i, j = tile_at(index, 0, 0, 1, 1, m, n, BLOCK_M, BLOCK_N, 1)
        first, end = chunks_of_tile(i, m, BLOCK_M, chunk_rows)
        for chunk in range(max(first, waited), end):
            came &= wait_all(arrived, chunk * flag_stride, rank, now, patience, error, WORLD)
        waited = end
        rows = (i * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
        place = rows[:, None] * n + columns[None, :]
        mask = (rows < m)[:, None] & (columns < n)[None, :]
        total = sum_parts(inbox, out, place, mask, WORLD)
        total = tl.where(came, total, float("nan"))
        tl.store(out + place, total.to(out.dtype.element_ty), mask)


@triton.jit
def sum_parts(inbox, like, place, mask, WORLD: tl.constexpr):
    """Return the fp32 sum of the ranks' parts at `place`, in rank order, read BATCH at a time.

    like: a pointer to elements of the same dtype.
    """
    total = tl.zeros(place.shape, tl.float32)
    for first in tl.static_range(0, WORLD, BATCH):
        starts, parts = (), ()
        for at in tl.static_range(min(BATCH, WORLD - first)):
            starts = starts + (tl.load(inbox + first + at),)  # type: ignore[assignment]
        for at in tl.static_range(min(BATCH, WORLD - first)):
            part = tl.multiple_of(starts[at].to(like.dtype), 16)
            parts = parts + (tl.load(part + place, mask, 0.0),)
        for at in tl.static_range(min(BATCH, WORLD - first)):
            total += parts[at].to(tl.float32)
    return total


def matmul_scatter(
    x: Tensor, w: Tensor, exchange: Exchange, *, blocks: Blocks | None = None
) -> None:
    """Send every rank its rows of x w^T: the first launch; x [world m, k], w [n, k].

    w: any strides of which one is 1. Raises ValueError for a device or dtype that the kernels do
    not support.
    """
    check_device(x)
    (rows, k), n, world = x.shape, w.shape[0], exchange.world
    m = rows // world
    assert x.is_contiguous() and w.shape[1] == k and 1 in w.stride() and x.data_ptr() % 16 == 0
    assert rows == world * m
    blocks = blocks or choose_blocks(x, w, m, exchange.sms_left)
    matmul_scatter_kernel.launch(
        (blocks.programs,),
        x, w, exchange.outbox, exchange.raises, exchange.counters, exchange.tickets, m, n, k,
        w.stride(0), w.stride(1), exchange.chunk_rows, exchange.flag_stride, exchange.chunks(m),
        exchange.rank, exchange.epoch, WORLD=world, RAISE=raise_flag, **constants(blocks, w),
    )  # fmt: skip


def add_parts(out: Tensor, exchange: Exchange, *, programs: int | None = None) -> None:
    """Fill out [m, n] with the sum of the ranks' parts: the second launch, which waits.

    programs: None for REDUCE_PROGRAMS on each SM but exchange.sms_left.
    """
    m, n = out.shape
    if programs is None:
        sms = count_sms(out.device, exchange.sms_left) if out.is_cuda else 1
        programs = REDUCE_PROGRAMS * sms
    reduce_kernel.launch(
        (programs,),
        exchange.inbox, exchange.arrived, out, exchange.error.data_ptr(), m, n,
        exchange.chunk_rows, exchange.flag_stride, exchange.rank, exchange.epoch,
        exchange.patience, WORLD=exchange.world, BLOCK_M=REDUCE_ROWS, BLOCK_N=REDUCE_COLUMNS,
    )  # fmt: skip
