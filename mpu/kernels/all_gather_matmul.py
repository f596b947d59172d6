# SPDX-License-Identifier: Apache-2.0
"""Multiply all ranks' rows by this rank's weight while the rows arrive: y = gather(x) w^T.

One launch. The first programs push this rank's rows into its peers' memory, chunk by chunk, and
raise a flag for each chunk; then they join the other programs, which multiply own rows first:

    rank 1 of 3, chunks a b       time ->
    pushers    1a>0  1b>0  1a>2  1b>2 | then as the others     the previous rank needs them first
    from 2           2a    2b                     flags (2 -> 1), chunks a and b
    from 0                       0a    0b
    programs   1a 1b | 2a 2b | 0a 0b              row tiles; 2b waits for the flag of chunk 2b

A tile waits only for the chunks that contain its rows (tiles.py); own rows need no wait.

No waiting program holds up the raising of a flag, so the ranks cannot deadlock, in whatever order
the hardware starts programs and however few of them run:
- Pieces to push and tiles to multiply are taken by tickets (tickets.py), by running programs.
- Pushers are the first programs that begin. They push until no piece is left and only then take a
  tile. Any other program takes a tile only when all pushers have begun. So all of a rank's rows are
  pushed by running programs that wait for nothing.
- So all flags of a rank rise once one of its programs runs, for which it needs one SM. Other
  kernels leave one free: our kernels use all SMs but `sms_left`, NCCL's only a few.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels import tiles
from mpu.kernels.declared import Cost, declared
from mpu.kernels.product import (
    Blocks,
    choose_blocks,
    constants,
    open_rows,
    open_weight,
    tile_product,
)
from mpu.kernels.signals import (
    Exchange,
    check_device,
    compiled,
    raise_flag,
    tile_done,
    wait_flag,
    wait_tile,
)
from mpu.kernels.tickets import BEGUN, MULTIPLIED, PUSHED, leave, take

PUSHERS = 16  # programs that push, on a GPU
PUSH_ROWS = 16  # rows that a pusher copies per ticket: few, so that chunks are sent in order
PUSH_BYTES = 64  # bytes of these rows that a thread reads at once
PIECES = tl.constexpr(4)  # pieces of PUSH_BYTES that are read before the first is written
tile_at = compiled(tiles.tile_at)
tile_count = compiled(tiles.tile_count)


@triton.jit
def push_rows(
    x, outbox, raises, counters, tickets, m, k, chunk_rows, flag_stride, chunks, rank, epoch,
    WORLD: tl.constexpr, PUSH_M: tl.constexpr, PUSH_K: tl.constexpr, RAISE: tl.constexpr,
):  # fmt: skip
    """Copy own rows x [m, k] to every peer, first to the previous rank, and raise the flags."""
    total = tile_count(WORLD - 1, m, 1, PUSH_M, 1)
    index = take(tickets, PUSHED)
    while index < total:
        peer, tile, _ = tile_at(index, rank, WORLD - 1, WORLD - 1, WORLD, m, 1, PUSH_M, 1, 1)
        there = tl.load(outbox + peer).to(x.dtype)
        rows = (tile * PUSH_M + tl.arange(0, PUSH_M)).to(tl.int64)
        push_tile(x, tl.multiple_of(there, 16), rows, m, k, PUSH_K)
        tile_done(
            raises, counters, peer, tile, m, 1, PUSH_M, chunk_rows, flag_stride, chunks, epoch,
            RAISE,
        )  # fmt: skip
        index = take(tickets, PUSHED)


@triton.jit
def push_tile(x, there, rows, m, k, PUSH_K: tl.constexpr):
    """Copy some rows of x [m, k], with PIECES reads in flight at a time."""
    for at in range(0, k, PIECES * PUSH_K):
        pieces = ()
        for piece in tl.static_range(PIECES):
            columns = at + piece * PUSH_K + tl.arange(0, PUSH_K)
            mask = (rows < m)[:, None] & (columns < k)[None, :]
            part = tl.load(x + rows[:, None] * k + columns[None, :], mask)
            pieces = pieces + (part,)  # type: ignore[assignment]
        for piece in tl.static_range(PIECES):
            columns = at + piece * PUSH_K + tl.arange(0, PUSH_K)
            mask = (rows < m)[:, None] & (columns < k)[None, :]
            tl.store(there + rows[:, None] * k + columns[None, :], pieces[piece], mask)


@triton.jit
def multiply_rows(
    x, w, y, inbox, arrived, tickets, error, m, n, k, stride_n, stride_k, chunk_rows, flag_stride,
    rank, epoch, patience, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr,
    DOT_F32: tl.constexpr, PRECISION: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of y, own rows first, each once the chunks that it needs have arrived."""
    error = error.to(tl.int64).to(tl.pointer_type(tl.int32))
    weight = open_weight(w, n, k, stride_n, stride_k, BLOCK_N, BLOCK_K, ROWS, TMA)
    total = tile_count(WORLD, m, n, BLOCK_M, BLOCK_N)
    index = take(tickets, MULTIPLIED)
    while index < total:
        owner, i, j = tile_at(index, rank, 0, 1, WORLD, m, n, BLOCK_M, BLOCK_N, GROUP)
        came = True
        theirs = x
        if owner != rank:
            came = wait_tile(
                arrived, owner, i, m, BLOCK_M, chunk_rows, flag_stride, epoch, patience, error,
                WAIT, TMA,
            )  # fmt: skip
            theirs = tl.load(inbox + owner).to(x.dtype)
        shard = open_rows(theirs, m, k, BLOCK_M, BLOCK_K, TMA)
        product = tile_product(
            shard, weight, i * BLOCK_M, m, j * BLOCK_N, n, k, stride_n, stride_k, BLOCK_M, BLOCK_N,
            BLOCK_K, ROWS, TMA, DOT_F32, PRECISION,
        )  # fmt: skip
        rows = (i * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
        product = tl.where(came, product, float("nan"))
        place = (owner.to(tl.int64) * m + rows)[:, None] * n + columns[None, :]
        mask = (rows < m)[:, None] & (columns < n)[None, :]
        tl.store(y + place, product.to(y.dtype.element_ty), mask)
        index = take(tickets, MULTIPLIED)


def cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: own rows are sent to WORLD - 1 ranks; all ranks' rows are multiplied."""
    m, n, k, world, size = a["m"], a["n"], a["k"], a["WORLD"], a["x"].element_size()
    pushed = 2 * (world - 1) * m * k * size
    multiplied = (world * m * k + n * k) * size + world * m * n * a["y"].element_size()
    return Cost(pushed + multiplied, 2.0 * world * m * n * k, ("y",))


@declared(cost, x="whole aligned", w="same", y="whole")
@triton.jit(do_not_specialize=["rank", "epoch", "patience"])
def all_gather_matmul_kernel(
    x, w, y, inbox, arrived, outbox, raises, counters, tickets, error, m, n, k, stride_n, stride_k,
    chunk_rows, flag_stride, chunks, rank, epoch, patience, PUSHERS: tl.constexpr,
    PUSH_M: tl.constexpr, PUSH_K: tl.constexpr, WORLD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    TMA: tl.constexpr, DOT_F32: tl.constexpr, PRECISION: tl.constexpr, WAIT: tl.constexpr,
    RAISE: tl.constexpr,
):  # fmt: skip
    """Push and multiply: own rows x [m, k], w [n, k] (strides), y [WORLD m, n]; tables: Exchange.
    """
    now = tl.load(epoch)
    if take(tickets, BEGUN) < PUSHERS:
        push_rows(
            x, outbox, raises, counters, tickets, m, k, chunk_rows, flag_stride, chunks, rank, now,
            WORLD, PUSH_M, PUSH_K, RAISE,
        )  # fmt: skip
    multiply_rows(
        x, w, y, inbox, arrived, tickets, error, m, n, k, stride_n, stride_k, chunk_rows,
        flag_stride, rank, now, patience, WORLD, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, ROWS, TMA,
        DOT_F32, PRECISION, WAIT,
    )  # fmt: skip
    leave(tickets)


def push_columns(blocks: Blocks, dtype: torch.dtype) -> int:
    """Return the number of columns of PUSH_ROWS rows for which each thread has PUSH_BYTES."""
    return PUSH_BYTES * 32 * blocks.warps // (PUSH_ROWS * dtype.itemsize)


def all_gather_matmul(
    x: Tensor, w: Tensor, exchange: Exchange, *, blocks: Blocks | None = None
) -> Tensor:
    """Return gather(x) w^T, [world m, n], of own rows x [m, k] and weight w [n, k].

    w: any strides of which one is 1, so `weight.t()` of a [k, n] weight is fine. Raises ValueError
    for a device or dtype that the kernels do not support.
    """
    check_device(x)
    (m, k), n = x.shape, w.shape[0]
    assert x.is_contiguous() and w.shape[1] == k and 1 in w.stride() and x.data_ptr() % 16 == 0
    y = x.new_empty((exchange.world * m, n))
    blocks = blocks or choose_blocks(x, w, m, exchange.sms_left)
    all_gather_matmul_kernel.launch(
        (blocks.programs,),
        x, w, y, exchange.inbox, exchange.arrived, exchange.outbox, exchange.raises,
        exchange.counters, exchange.tickets, exchange.error.data_ptr(), m, n, k, w.stride(0),
        w.stride(1), exchange.chunk_rows, exchange.flag_stride, exchange.chunks(m), exchange.rank,
        exchange.epoch, exchange.patience, PUSHERS=min(PUSHERS, blocks.programs // 2 + 1),
        PUSH_M=PUSH_ROWS, PUSH_K=push_columns(blocks, x.dtype), WORLD=exchange.world,
        WAIT=wait_flag, RAISE=raise_flag, **constants(blocks, w),
    )  # fmt: skip
    return y
