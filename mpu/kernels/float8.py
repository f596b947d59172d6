# SPDX-License-Identifier: Apache-2.0
"""Make rows of float8 (mpu/layers/float8/rows.py), in one launch if no ranks share a scale.

    rows         computes the scales and writes codes, bytes and padding: a scale per row or block
    row_scales   reads x once; writes a byte for each block of each row, for ranks to agree on
    encode       reads x and the bytes; writes codes, bytes and padding

x is read once if a program holds all numbers that share a scale: a block, or rows of up to MAX_ROW
contiguous numbers. Otherwise its rows are read twice, for the scale and for the codes. x is fp32 or
bf16 with any strides, so that a transpose needs no copy. Or x is rows of float8, from which rows
along the other dimension are made: their codes are decoded as they are read.

Codes are the same on every device. From compute capability 9.0 on an instruction rounds fp32 to
float8: to nearest, ties to even, and clamped to the maximum (PTX ISA, cvt.rn.satfinite.e4m3x2.f32
and .e5m2x2.f32). On other devices arithmetic on the bits of fp32 does the same; for 8.9 Triton
would round twice, via fp16. These kernels are limited by instructions, not by memory: at first they
took 79 instructions per number requantized from rows (docs/gpu-results.md). Tile sizes are the
fastest of those measured on an H200.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import Cost, declared
from mpu.kernels.launch import cdiv, next_power_of_2

ROWS, STEP, WARPS = 32, 128, 4  # of a tile
MAX_ROW = 16384  # the longest row that a program holds, in numbers
CONVERTS = (9, 0)  # the compute capability from which fp32 is rounded to float8 by an instruction


class Codes(NamedTuple):
    """A format: bits of the fraction, bias of the exponent, and the maximum, 1.75 x 2^shift."""

    fraction: int
    bias: int
    top: float
    shift: int


def converts(x: Tensor) -> bool:
    """Return whether x's device rounds fp32 to float8 by an instruction."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= CONVERTS


class Numbers(NamedTuple):
    """A kernel's input: x [n, k]; or, if block is not None, the transpose of float8 rows x.

    block: numbers of those rows that share a scale, 0 for all; codes: the number per row.
    """

    x: Tensor
    n: int
    k: int
    block: int | None = None
    codes: int = 0

    def arguments(self) -> tuple[Tensor, int, int, int, int, int, int, bool]:
        """Return the first arguments of the kernels, and whether x is float8 rows."""
        along_n, along_k = self.x.stride()
        if self.block is not None:
            along_n, along_k = 1, along_k * self.x.stride(0)
        sharing = (self.block or self.codes) if self.block is not None else 1
        return self.x, self.n, self.k, along_n, along_k, self.codes, sharing, self.block is not None

    @property
    def side_by_side(self) -> bool:
        """Return whether the numbers of a row are contiguous."""
        return self.block is None and self.x.stride(1) == 1


def row_scales(given: Numbers, block: int, out: Tensor, form: Codes) -> None:
    """Fill out [n, k / block], or [n, 1] for block 0, with bytes."""
    *sizes, rows = given.arguments()
    tile = dict(ROWS=ROWS, STEP=STEP, num_warps=WARPS) if block else piece_of(given)
    grid = (cdiv(given.n, tile["ROWS"]), cdiv(given.k, STEP) if block else 1)
    row_scales_kernel.launch(
        grid,
        *sizes, out, FROM_ROWS=rows, BLOCK=block, FRACTION=form.fraction, SHIFT=form.shift,
        CONVERTS=converts(given.x), **tile,
    )  # fmt: skip


def encode(given: Numbers, scales: Tensor, out: Tensor, wide: Tensor | None, form: Codes) -> None:
    """Fill rows out [n, length], uint8, and wide [n, blocks], if given, with their scales in fp32.

    scales: [n, blocks], bytes, whose strides may be 0. wide is column-major.
    """
    *sizes, rows = given.arguments()
    length, blocks = out.shape[1], scales.shape[1]
    encode_kernel.launch(
        (cdiv(given.n, ROWS), cdiv(given.k, STEP)),
        *sizes, scales, *scales.stride(), out, wide, length, blocks=blocks, FROM_ROWS=rows,
        BLOCK=given.k // blocks if blocks > 1 else 0, FRACTION=form.fraction, BIAS=form.bias,
        TOP=form.top, CONVERTS=converts(given.x), ROWS=ROWS, STEP=STEP, num_warps=WARPS,
    )  # fmt: skip


def rows(
    given: Numbers, block: int, out: Tensor, wide: Tensor | None, form: Codes, square: bool
) -> None:
    """Do `row_scales` and `encode` in one launch.

    square: a scale also spans `block` rows.
    """
    *sizes, from_rows = given.arguments()
    blocks, tile = given.k // block if block else 1, tile_of(given, block, square)
    steps = cdiv(given.k, tile["STEP"]) if block else 1
    rows_kernel.launch(
        (cdiv(given.n, tile["ROWS"]), steps),
        *sizes, out, wide, out.shape[1], blocks, FROM_ROWS=from_rows, BLOCK=block, SQUARE=square,
        FRACTION=form.fraction, BIAS=form.bias, TOP=form.top, SHIFT=form.shift,
        CONVERTS=converts(given.x), **tile,
    )  # fmt: skip


def tile_of(given: Numbers, block: int, square: bool) -> dict[str, int]:
    """Return a tile's rows, columns and warps, and whether it holds all numbers that share a scale.

    If the input is float8 rows, the rows of a tile are in one block.
    """
    if block:
        rows = block if square else min(2 * ROWS, block) if given.block else ROWS
        warps = 8 if square else WARPS
        return dict(ROWS=rows, STEP=STEP, WHOLE=True, num_warps=warps)
    if given.side_by_side and given.k <= MAX_ROW:
        columns = max(512, next_power_of_2(given.k))
        rows = max(1, 2048 // columns)
        return dict(ROWS=rows, STEP=columns, WHOLE=True, num_warps=max(4, rows * columns // 1024))
    return piece_of(given) | dict(WHOLE=False)


def piece_of(given: Numbers) -> dict[str, int]:
    """Return the rows, columns and warps of a tile that covers only a piece of its rows."""
    rows, step = (2, 2048) if given.side_by_side else (ROWS, 256)
    return dict(ROWS=rows, STEP=step, num_warps=8)


@triton.jit
def number_of(code, FRACTION: tl.constexpr, CONVERTS: tl.constexpr):
    """Return the numbers of codes, uint8, in fp32.

    The bits of a code, shifted to their place in fp16, are the code's number, times 2^-8 for e4m3,
    whose exponent has one bit less than fp16's. This also holds for subnormal codes.
    """
    if CONVERTS:
        form: tl.constexpr = tl.float8e4nv if FRACTION == 3 else tl.float8e5
        number = code.to(form, bitcast=True).to(tl.float32)
    elif FRACTION == 3:
        bits = code.to(tl.int32)
        half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        number = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        number = tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
    else:
        number = (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def read(
    x, first, start, n, k, along_n, along_k, codes, sharing, FROM_ROWS: tl.constexpr,
    FRACTION: tl.constexpr, CONVERTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the tile of x [n, k] at [first, start] in fp32; float8 rows are decoded."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, STEP)[None, :]
    inside = (first + i < n) & (start + j < k)
    row = x + tl.cast(start, tl.int64) * along_k
    numbers = tl.load(
        row + tl.cast(first, tl.int64) * along_n + (i * along_n + j * along_k), inside, 0
    )
    if FROM_ROWS:
        scale = tl.load(row + (codes + first // sharing) + j * along_k, start + j < k, 0)
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        found = number_of(numbers, FRACTION, CONVERTS) * scale
    else:
        found = numbers.to(tl.float32)
    return found


@triton.jit
def byte_of(top, SHIFT: tl.constexpr):
    """Return the byte of a scale, given the bits of the largest absolute value that shares it."""
    byte = tl.maximum(((top + 0x1FFFFF) >> 23) - SHIFT, 1)
    return tl.where(top >= 0x7F800000, 255, byte)


@triton.jit
def code_of(
    number, byte, FRACTION: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Return the codes, in uint8, of numbers divided by the scales that the bytes represent."""
    inverse = (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)
    if CONVERTS:
        form: tl.constexpr = tl.float8e4nv if FRACTION == 3 else tl.float8e5
        return (number * inverse).to(form).to(tl.uint8, bitcast=True)
    bits = (number * inverse).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    not_a_number = size > 0x7F800000
    size = tl.where(not_a_number, 0, size).to(tl.float32, bitcast=True)
    size = tl.minimum(size, TOP)
    whole = size.to(tl.int32, bitcast=True)
    normal = (whole + ((1 << (22 - FRACTION)) - 1) + ((whole >> (23 - FRACTION)) & 1)) >> (
        23 - FRACTION
    )
    magic: tl.constexpr = 2.0 ** (24 - BIAS - FRACTION)  # whose last bit is the smallest code
    small = (size + magic).to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(size >= 2.0 ** (1 - BIAS), normal - ((127 - BIAS) << FRACTION), small)
    return (tl.where(not_a_number, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def rows_at(out, first, length, ROWS: tl.constexpr):
    """Return the addresses of a tile's rows of `length` bytes."""
    return out + tl.cast(first, tl.int64) * length + tl.arange(0, ROWS)[:, None] * length


@triton.jit
def write_scales(row, wide, i, column, byte, n, k, blocks):
    """Write the bytes of scales after the codes, and the scales in fp32 to `wide`, column-major."""
    real = (i < n) & (column < blocks)
    tl.store(row + k + column, byte.to(tl.uint8), real)
    if wide is not None:
        tl.store(wide + column * n + i, (byte << 23).to(tl.float32, bitcast=True), real)


@triton.jit
def finish(row, real, k, blocks, length):
    """Write the zero padding after the scales."""
    place = (blocks + tl.arange(0, 16))[None, :]
    tl.store(row + k + place, 0, real & (k + place < length))


def scales_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: numbers are read once."""
    return Cost(a["n"] * a["k"] * a["x"].element_size() + a["out"].numel(), 0.0, ("out",))


def encode_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: numbers and scales are read; rows, and fp32 scales if requested, written."""
    moved = a["n"] * a["k"] * a["x"].element_size() + a["n"] * a["blocks"]
    return Cost(moved + written_bytes(a), 0.0, ("out", "wide"))


def rows_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: numbers are read once, or twice if a scale spans several tiles."""
    moved = a["n"] * a["k"] * a["x"].element_size() * (1 if a["WHOLE"] else 2)
    return Cost(moved + written_bytes(a), 0.0, ("out", "wide"))


def written_bytes(a: Mapping[str, Any]) -> int:
    """Return the bytes of rows, and of fp32 scales if they are requested."""
    return int(a["out"].numel() + (0 if a["wide"] is None else a["wide"].nbytes))


@declared(scales_cost, out="whole")
@triton.jit
def row_scales_kernel(
    x, n, k, along_n, along_k, codes, sharing, out,
    FROM_ROWS: tl.constexpr, BLOCK: tl.constexpr, FRACTION: tl.constexpr, SHIFT: tl.constexpr,
    CONVERTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the scale bytes of a tile's blocks, or of whole rows, from the maximum of the bits."""
    first = tl.program_id(0) * ROWS
    i = (first + tl.arange(0, ROWS))[:, None]
    begin = tl.program_id(1) * STEP
    end = k if BLOCK == 0 else tl.minimum(begin + STEP, k)
    most = tl.zeros((ROWS, STEP), tl.int32)
    for start in range(begin, end, STEP):
        number = read(
            x, first, start, n, k, along_n, along_k, codes, sharing, FROM_ROWS, FRACTION, CONVERTS,
            ROWS, STEP,
        )  # fmt: skip
        most = tl.maximum(most, number.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    groups: tl.constexpr = STEP // BLOCK if BLOCK else 1
    byte = byte_of(tl.max(tl.reshape(most, (ROWS, groups, STEP // groups)), 2), SHIFT)
    blocks = k // BLOCK if BLOCK else 1
    column = (tl.program_id(1) * groups + tl.arange(0, groups))[None, :]
    tl.store(out + i * blocks + column, byte.to(tl.uint8), (i < n) & (column < blocks))


@declared(encode_cost, out="whole", wide="columns float32")
@triton.jit
def encode_kernel(
    x, n, k, along_n, along_k, codes, sharing, scales, scales_n, scales_k, out, wide, length,
    blocks, FROM_ROWS: tl.constexpr, BLOCK: tl.constexpr, FRACTION: tl.constexpr,
    BIAS: tl.constexpr, TOP: tl.constexpr, CONVERTS: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Write the codes of a tile; the first tile of a row also writes the padding."""
    first, start = tl.program_id(0) * ROWS, tl.program_id(1) * STEP
    number = read(
        x, first, start, n, k, along_n, along_k, codes, sharing, FROM_ROWS, FRACTION, CONVERTS,
        ROWS, STEP,
    )  # fmt: skip
    i, j = (first + tl.arange(0, ROWS))[:, None], (start + tl.arange(0, STEP))[None, :]
    row = rows_at(out, first, length, ROWS)
    groups: tl.constexpr = STEP // BLOCK if BLOCK else 1
    column = (tl.program_id(1) * (groups if BLOCK else 0) + tl.arange(0, groups))[None, :]
    real = (i < n) & (column < blocks)
    byte = tl.load(scales + i * scales_n + column * scales_k, real, 0).to(tl.int32)
    each = tl.broadcast_to(byte[:, :, None], (ROWS, groups, STEP // groups))
    each = tl.reshape(each, (ROWS, STEP))
    tl.store(row + j, code_of(number, each, FRACTION, BIAS, TOP, CONVERTS), (i < n) & (j < k))
    if BLOCK:
        write_scales(row, wide, i, column, byte, n, k, blocks)
    if tl.program_id(1) == 0:
        if not BLOCK:
            write_scales(row, wide, i, column, byte, n, k, blocks)
        finish(row, i < n, k, blocks, length)


@declared(rows_cost, out="whole", wide="columns float32")
@triton.jit
def rows_kernel(
    x, n, k, along_n, along_k, codes, sharing, out, wide, length, blocks, FROM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SQUARE: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    TOP: tl.constexpr, SHIFT: tl.constexpr, CONVERTS: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute scales and write rows. WHOLE: a tile has all numbers that share its scales."""
    first, step = tl.program_id(0) * ROWS, tl.arange(0, STEP)[None, :]
    i, row = (first + tl.arange(0, ROWS))[:, None], rows_at(out, first, length, ROWS)
    groups: tl.constexpr = STEP // BLOCK if BLOCK else 1
    if WHOLE:
        start = tl.program_id(1) * STEP
        j = start + step
        number = read(
            x, first, start, n, k, along_n, along_k, codes, sharing, FROM_ROWS, FRACTION, CONVERTS,
            ROWS, STEP,
        )  # fmt: skip
        bits = number.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top = tl.max(tl.reshape(bits, (ROWS, groups, STEP // groups)), 2)
        if SQUARE:
            top = tl.broadcast_to(tl.max(top, 0)[None, :], (ROWS, groups))
        byte = byte_of(top, SHIFT)
        each = tl.broadcast_to(byte[:, :, None], (ROWS, groups, STEP // groups))
        each = tl.reshape(each, (ROWS, STEP))
        tl.store(row + j, code_of(number, each, FRACTION, BIAS, TOP, CONVERTS), (i < n) & (j < k))
    else:
        most = tl.zeros((ROWS, STEP), tl.int32)
        for start in range(0, k, STEP):
            number = read(
                x, first, start, n, k, along_n, along_k, codes, sharing, FROM_ROWS, FRACTION,
                CONVERTS, ROWS, STEP,
            )  # fmt: skip
            most = tl.maximum(most, number.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        byte = byte_of(tl.max(most, 1)[:, None], SHIFT)
        for start in range(0, k, STEP):
            number = read(
                x, first, start, n, k, along_n, along_k, codes, sharing, FROM_ROWS, FRACTION,
                CONVERTS, ROWS, STEP,
            )  # fmt: skip
            code = code_of(number, byte, FRACTION, BIAS, TOP, CONVERTS)
            tl.store(row + start + step, code, (i < n) & (start + step < k))
    column = (tl.program_id(1) * groups + tl.arange(0, groups))[None, :]
    write_scales(row, wide, i, column, byte, n, k, blocks)
    if tl.program_id(1) == 0:
        finish(row, i < n, k, blocks, length)
