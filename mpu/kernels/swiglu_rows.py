# SPDX-License-Identifier: Apache-2.0
"""SwiGLU that writes float8 rows of its result and of the transpose, and no bf16 result.

    swiglu_scales   bytes for the scale of the whole result: one per program, of which the largest
                    is used
    swiglu_rows     codes, bytes and padding of both, as in mpu/kernels/float8.py

x is [n, 2 width], with rows [gate, up]. In forward the result is y [n, width]. In backward, if dy
is given, it is dx [n, 2 width], and a program computes the same columns of both halves.

A program has a tile of numbers in registers: they are rounded to x's dtype, encoded with the scales
of its rows, decoded, and encoded with those of its columns. So the rows of the transpose equal,
bit by bit, those requantized from the rows (mpu/layers/float8/rows.py, `remade`): blocks of 32 or
of 128 numbers are inside a tile, and a single scale for the whole tensor is computed beforehand, in
a separate pass.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import Cost, declared
from mpu.kernels.float8 import (
    Codes,
    byte_of,
    code_of,
    converts,
    finish,
    number_of,
    rows_at,
)
from mpu.kernels.launch import cdiv
from mpu.kernels.swiglu import gated, gated_backward


def swiglu_scales(
    x: Tensor, dy: Tensor | None, out: Tensor, form: Codes, tile: tuple[int, int]
) -> None:
    """Fill out with a byte for each tile of (tokens, columns): x [n, 2 width], dy [n, width] or
    None; contiguous.
    """
    (n, width), (tokens, columns) = (len(x), x.shape[1] // 2), tile
    swiglu_scales_kernel.launch(
        (cdiv(n, tokens), cdiv(width, columns)), x=x, dy=dy, out=out, n=n, width=width,
        SHIFT=form.shift, TOKENS=tokens, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def swiglu_rows(
    x: Tensor,
    dy: Tensor | None,
    scale: Tensor | None,
    block: int,
    out: Tensor,
    turned: Tensor | None,
    wide: Tensor | None,
    form: Codes,
) -> None:
    """Fill rows out [n, length] and, if given, those of the transpose, `turned` [k, length], and
    wide [k, blocks] with the transpose's scales in fp32, column-major.

    x [n, 2 width], dy [n, width] or None; contiguous. block: numbers that share a scale, 32 or 128,
    of which n and width are multiples; 0: all numbers, whose byte is scale [1].
    """
    n, width, tile = len(x), x.shape[1] // 2, tile_with(block)
    swiglu_rows_kernel.launch(
        (cdiv(n, tile["TOKENS"]), cdiv(width, tile["COLUMNS"])), x=x, dy=dy, scale=scale,
        out=out, turned=turned, wide=wide, n=n, width=width, length=out.shape[1],
        turned_length=0 if turned is None else turned.shape[1], BLOCK=block,
        FRACTION=form.fraction, BIAS=form.bias, TOP=form.top, SHIFT=form.shift,
        CONVERTS=converts(x), **tile,
    )  # fmt: skip


def tile_with(block: int) -> dict[str, int]:
    """Return the tokens and columns of a tile that holds whole blocks, and its warps."""
    wide = block > 32  # with 64 columns more programs fit an SM
    return dict(TOKENS=128, COLUMNS=128 if wide else 64, num_warps=16 if wide else 8)


@triton.jit
def tile_of(x, dy, n, width, first, start, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tile of y, twice, or those of d_gate and d_up: rounded to x's dtype, in fp32."""
    i = (first + tl.arange(0, TOKENS))[:, None]
    j = (start + tl.arange(0, COLUMNS))[None, :]
    inside = (i < n) & (j < width)
    here = x + i.to(tl.int64) * 2 * width + j
    gate = tl.load(here, inside, 0.0).to(tl.float32)
    up = tl.load(here + width, inside, 0.0).to(tl.float32)
    if dy is None:
        left = gated(gate, up)
        right = left
    else:
        grad = tl.load(dy + i.to(tl.int64) * width + j, inside, 0.0).to(tl.float32)
        left, right = gated_backward(gate, up, grad)
    kind: tl.constexpr = x.dtype.element_ty
    return left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)


@triton.jit
def sizes_of(number):
    """Return the bits of numbers without their signs; they order as absolute values do."""
    return number.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def spread(byte, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return each number's byte, given the bytes of blocks: [ROWS / r, COLUMNS / c]."""
    r: tl.constexpr = ROWS // byte.shape[0]
    c: tl.constexpr = COLUMNS // byte.shape[1]
    shape: tl.constexpr = (byte.shape[0], r, byte.shape[1], c)
    return tl.reshape(tl.broadcast_to(byte[:, None, :, None], shape), (ROWS, COLUMNS))


@triton.jit
def write(
    number, scale, out, turned, wide, n, k, length, turned_length, begin, end,
    BLOCK: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr,
    SHIFT: tl.constexpr, CONVERTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the rows of a tile of [n, k], with columns [begin, end) of k, and of its transpose."""
    first = tl.program_id(0) * TOKENS
    i, j = (first + tl.arange(0, TOKENS))[:, None], (begin + tl.arange(0, COLUMNS))[None, :]
    groups: tl.constexpr = COLUMNS // BLOCK if BLOCK else 1
    blocks = k // BLOCK if BLOCK else 1
    row = rows_at(out, first, length, TOKENS)
    if BLOCK:
        bits = tl.reshape(sizes_of(number), (TOKENS, groups, COLUMNS // groups))
        byte = byte_of(tl.max(bits, 2), SHIFT)
        column = (begin // BLOCK + tl.arange(0, groups))[None, :]
        tl.store(row + k + column, byte.to(tl.uint8), (i < n) & (column * BLOCK < end))
    else:
        byte = tl.zeros((TOKENS, 1), tl.int32) + tl.load(scale).to(tl.int32)
        tl.store(row + k, byte.to(tl.uint8), (i < n) & (begin == 0))
    each = spread(byte, TOKENS, COLUMNS)
    code = code_of(number, each, FRACTION, BIAS, TOP, CONVERTS)
    tl.store(row + j, code, (i < n) & (j < end))
    if begin == 0:
        finish(row, i < n, k, blocks, length)
    if turned is not None:
        rounds: tl.constexpr = TOKENS // BLOCK if BLOCK else 1  # blocks of tokens
        blocks = n // BLOCK if BLOCK else 1
        token = (first + tl.arange(0, TOKENS))[None, :]
        feature = (begin + tl.arange(0, COLUMNS))[:, None]
        row = rows_at(turned, begin, turned_length, COLUMNS)
        column = (tl.program_id(0) * rounds + tl.arange(0, rounds))[None, :]
        if BLOCK:
            decoded = number_of(code, FRACTION, CONVERTS) * scale_of(each)
            bits = tl.reshape(sizes_of(decoded), (rounds, TOKENS // rounds, COLUMNS))
            byte = byte_of(tl.max(bits, 1), SHIFT)
            each = spread(byte, TOKENS, COLUMNS)
            code = code_of(decoded, each, FRACTION, BIAS, TOP, CONVERTS)
        else:
            byte = tl.zeros((1, COLUMNS), tl.int32) + tl.load(scale).to(tl.int32)
            column = tl.zeros((1, 1), tl.int32)
        tl.store(row + token, tl.trans(code), (feature < end) & (token < n))
        real = (feature < end) & (column < blocks) & (BLOCK > 0 or first == 0)
        tl.store(row + n + column, tl.trans(byte).to(tl.uint8), real)
        if wide is not None:
            tl.store(wide + column * k + feature, tl.trans(scale_of(byte)), real)
        if first == 0:
            finish(row, feature < end, n, blocks, turned_length)


@triton.jit
def scale_of(byte):
    """Return the scales of bytes; infinity for 255."""
    return (byte << 23).to(tl.float32, bitcast=True)


def scales_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: SwiGLU's inputs are read once."""
    return Cost(read_bytes(a) + a["out"].numel(), 0.0, ("out",))


def rows_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: SwiGLU's inputs are read once, and the requested rows are written."""
    made = [x for x in (a["out"], a["turned"], a["wide"]) if x is not None]
    return Cost(read_bytes(a) + sum(x.nbytes for x in made), 0.0, ("out", "turned", "wide"))


def read_bytes(a: Mapping[str, Any]) -> int:
    """Return the bytes that SwiGLU reads, forward or backward."""
    return int(a["x"].nbytes + (0 if a["dy"] is None else a["dy"].nbytes))


@declared(scales_cost, x="whole same", dy="whole same", out="whole")
@triton.jit
def swiglu_scales_kernel(
    x, dy, out, n, width, SHIFT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write the byte of a tile's largest number."""
    first, start = tl.program_id(0) * TOKENS, tl.program_id(1) * COLUMNS
    left, right = tile_of(x, dy, n, width, first, start, TOKENS, COLUMNS)
    top = sizes_of(left)
    if dy is not None:
        top = tl.maximum(top, sizes_of(right))
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out + at, byte_of(tl.max(tl.max(top, 1), 0), SHIFT).to(tl.uint8))


@declared(
    rows_cost, x="whole same", dy="whole same", scale="whole", out="whole", turned="whole",
    wide="columns float32",
)  # fmt: skip
@triton.jit
def swiglu_rows_kernel(
    x, dy, scale, out, turned, wide, n, width, length, turned_length, BLOCK: tl.constexpr,
    FRACTION: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr, SHIFT: tl.constexpr,
    CONVERTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile's rows: of y, or of d_gate and d_up."""
    first, start = tl.program_id(0) * TOKENS, tl.program_id(1) * COLUMNS
    left, right = tile_of(x, dy, n, width, first, start, TOKENS, COLUMNS)
    k = width if dy is None else 2 * width
    write(
        left, scale, out, turned, wide, n, k, length, turned_length, start, width, BLOCK, FRACTION,
        BIAS, TOP, SHIFT, CONVERTS, TOKENS, COLUMNS,
    )  # fmt: skip
    if dy is not None:
        write(
            right, scale, out, turned, wide, n, k, length, turned_length, width + start, k, BLOCK,
            FRACTION, BIAS, TOP, SHIFT, CONVERTS, TOKENS, COLUMNS,
        )  # fmt: skip
