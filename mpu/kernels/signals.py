# SPDX-License-Identifier: Apache-2.0
"""Raise and await the flags by which ranks signal one another that a chunk of rows is written.

    writer                                          reader
    many programs: store their tiles                one program, before it reads a tile:
    each: count, acquire and release on this GPU    poll the flag, acquire, whole system
    the last: raise the flag, release, whole system

A flag is an int32 that holds the epoch of the last write. It only increases (modulo 2**32) and is
never reset, so a wait is for `flag - epoch >= 0`. The epoch is read from device memory, where a
kernel increments it in stream order, so a CUDA graph may be replayed. Every wait has a timeout:
after `patience` polls (about a microsecond each on a GPU) the reader writes 1 + the late rank into
the error word, continues, and fills with NaN what it could not compute. The error word is in host
memory, so the host reads it without a synchronisation (`Exchange.check`). No kernel traps, so the
process can still report the error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels import tiles
from mpu.kernels.declared import Cost, declared
from mpu.kernels.launch import INTERPRETED

COMPILED = tl.constexpr(not INTERPRETED)


def compiled(formula: Callable[..., Any]) -> Any:
    """Return a function of tiles.py in a form that kernels can call; unchanged if interpreted."""
    return formula if INTERPRETED else triton.jit(formula)


chunks_of_tile = compiled(tiles.chunks_of_tile)
tiles_of_chunk = compiled(tiles.tiles_of_chunk)


@dataclass(frozen=True)
class Exchange:
    """One epoch of a symmetric buffer, as arguments of the kernels: addresses and sizes.

    Tables are int64 tensors of `world` addresses, on the device of the kernels. Addresses of data
    are multiples of 16. Flags are int32; those of further chunks follow flag_stride bytes apart.
    """

    rank: int
    world: int
    epoch: Tensor  # int32, one element, on the device: the value that flags must reach
    chunk_rows: int  # rows of a rank that one flag covers
    inbox: Tensor  # where this rank reads the piece that rank r wrote for it
    arrived: Tensor  # flag that rank r raises for its chunk 0
    outbox: Tensor  # where this rank writes its piece for rank r; for itself, its place in inbox
    raises: Tensor  # flag of chunk 0 to raise for rank r
    flag_stride: int
    counters: Tensor  # int32, zero, at least world x chunks: used by this rank's programs only
    tickets: Tensor  # int32, zero, TICKETS elements: see tickets.py; likewise
    error: Tensor  # int32, one element, on the host
    patience: int = 60_000_000
    sms_left: int = 0  # SMs of a GPU that are left to the kernels of other streams

    def check(self) -> None:
        """Raise TimeoutError if a wait has timed out."""
        if late := int(self.error[0]):
            raise TimeoutError(
                f"rank {late - 1} of the {self.world} did not raise its flag in time"
            )

    def chunks(self, m: int) -> int:
        """Return the number of chunks of m rows; there must be counters for them."""
        count = -(-m // self.chunk_rows)
        assert self.counters.numel() >= self.world * count, "too few counters"
        return count


@triton.jit
def wait_flag(flag, epoch, patience, error, source):
    """Poll a flag until it has reached the epoch; return whether it has within `patience` polls.

    Triton has no load with acquire; an atomic that adds 0 compiles to one.
    """
    reached = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch
    if reached < 0:
        polls = 0
        if tl.load(error) == 0:  # once one wait has timed out, the others end at once
            while (reached < 0) & (polls < patience):
                reached = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch
                polls += 1
        if reached < 0:
            tl.store(error, source + 1)
    return reached >= 0


@triton.jit
def wait_tile(
    arrived, source, tile, m, block_m, chunk_rows, flag_stride, epoch, patience, error,
    WAIT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Wait for every chunk that a row tile of rank `source` touches; return whether all arrived.

    TMA: rows are read through the async proxy, which needs a fence in addition to the acquire.
    """
    first, end = chunks_of_tile(tile, m, block_m, chunk_rows)
    flags = tl.load(arrived + source)
    came = True
    for chunk in range(first, end):
        flag = (flags + chunk * flag_stride).to(tl.pointer_type(tl.int32))
        came &= WAIT(flag, epoch, patience, error, source)
    if TMA and COMPILED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r,~{memory}", [], tl.int32, False, 1
        )
    return came


@triton.jit
def wait_all(arrived, offset, rank, epoch, patience, error, WORLD: tl.constexpr):
    """Wait for a flag of every rank but `rank`; return whether all are up. offset: of the chunk.

    All flags are polled at once, so the wait costs one latency for any number of ranks.
    """
    LANES: tl.constexpr = triton.next_power_of_2(WORLD)
    source = tl.arange(0, LANES)
    others = (source < WORLD) & (source != rank)
    flags = (tl.load(arrived + source, others, 0) + offset).to(tl.pointer_type(tl.int32))
    late = late_rank(flags, source, others, epoch)
    if late > 0:
        polls = 0
        if tl.load(error) == 0:  # once one wait has timed out, the others end at once
            while (late > 0) & (polls < patience):
                late = late_rank(flags, source, others, epoch)
                polls += 1
        if late > 0:
            tl.store(error, late)
    tl.debug_barrier()  # all threads may now read the data that the polling threads acquired
    return late == 0


@triton.jit
def late_rank(flags, source, others, epoch):
    """Return 1 + the highest rank whose flag has not reached the epoch, or 0."""
    reached = tl.atomic_add(flags, 0, mask=others, sem="acquire", scope="sys") - epoch
    return tl.max(tl.where(others & (reached < 0), source + 1, 0), 0)


@triton.jit
def raise_flag(flag, epoch):
    """Set a flag with release: a reader that acquires it sees all earlier writes of this program,
    and those of programs from which it had acquired.

    Triton has no store with release, so one thread stores by PTX. An atomic would also work, but
    makes a round trip to the peer's memory.
    """
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred one; .reg .u32 thread; mov.u32 thread, %tid.x; "
            "setp.eq.u32 one, thread, 0; @one st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,~{memory}", [flag.to(tl.int64), epoch], tl.int32, False, 1,
        )  # fmt: skip
    else:
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def tile_done(
    raises, counters, owner, tile, m, columns, block_m, chunk_rows, flag_stride, chunks, epoch,
    RAISE: tl.constexpr,
):  # fmt: skip
    """Count a stored tile in each chunk that it touches; the last tile of a chunk raises its flag.

    A chunk is complete after tiles_of_chunk x `columns` tiles. The count is local to this GPU.
    Release is cumulative, so the last program's release to the system covers the stores of all the
    tiles counted. That program resets the counter to zero for the next launch.
    """
    tl.debug_barrier()  # order the stores of all threads before the one thread's count
    first, end = chunks_of_tile(tile, m, block_m, chunk_rows)
    for chunk in range(first, end):
        counter = counters + owner * chunks + chunk
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == tiles_of_chunk(chunk, m, block_m, chunk_rows) * columns - 1:
            tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
            flag = tl.load(raises + owner) + chunk * flag_stride
            RAISE(flag.to(tl.pointer_type(tl.int32)), epoch)


@declared(lambda _: Cost(0))
@triton.jit(do_not_specialize=["epoch"])
def raise_flags_kernel(raises, epoch, RAISE: tl.constexpr):
    """Raise one flag per program, after all earlier writes on the stream."""
    flag = tl.load(raises + tl.program_id(0))
    RAISE(flag.to(tl.pointer_type(tl.int32)), tl.load(epoch))


@declared(lambda _: Cost(0))
@triton.jit(do_not_specialize=["epoch", "patience"])
def wait_flags_kernel(arrived, epoch, patience, error, WORLD: tl.constexpr, STEP: tl.constexpr):
    """Wait for all flags, so that later work on the stream may read. Then add STEP to the epoch."""
    now = tl.load(epoch)
    error = error.to(tl.int64)  # an address that fits 32 bits is passed as an int32
    wait_all(arrived, 0, -1, now, patience, error.to(tl.pointer_type(tl.int32)), WORLD)
    if STEP:
        tl.store(epoch, now + STEP)


def raise_flags(raises: Tensor, epoch: Tensor) -> None:
    """Raise the flags at the addresses in a table, in the order of the current stream."""
    raise_flags_kernel.launch((raises.numel(),), raises, epoch, raise_flag)


def wait_flags(arrived: Tensor, epoch: Tensor, patience: int, error: Tensor, step: int = 0) -> None:
    """Make the current stream wait for the flags at the addresses in a table; then add `step` to
    the epoch, to begin a new one."""
    wait_flags_kernel.launch(
        (1,), arrived, epoch, patience, error.data_ptr(), WORLD=arrived.numel(), STEP=step
    )


def check_device(x: Tensor) -> None:
    """Raise ValueError for a tensor with a device or dtype that the kernels do not support."""
    if x.is_cuda == INTERPRETED:
        raise ValueError(
            f"the overlap kernels got a tensor on {x.device}: they run on CUDA, or on the CPU "
            "where TRITON_INTERPRET=1 was set before triton was imported"
        )
    if x.dtype == torch.float64:
        raise ValueError("the overlap kernels sum in fp32 and do not take float64")
