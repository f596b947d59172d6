# SPDX-License-Identifier: Apache-2.0
"""Make rows of float8 (mpu/layers/float8_rows.py): the scales in one launch, the rows in another.

    row_scales   reads x once; writes a byte for each block of each row
    encode       reads x and the bytes; writes codes, bytes and padding

x is fp32 or bf16 of any strides, so that a transpose is made of what it is a transpose of. Or it is
rows of float8 themselves, to be made again along their other dimension: their codes are decoded
where they are read. Codes are made by arithmetic on the bits of fp32, the same on every device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, STEP, WARPS = 32, 128, 4  # of a tile


class Codes(NamedTuple):
    """A format: bits of a fraction, the exponent's bias, the top, which is 1.75 x 2^shift."""

    fraction: int
    bias: int
    top: float
    shift: int


class Numbers(NamedTuple):
    """What is read: x [n, k]; or, if block is not None, the transpose of rows x of float8.

    block: numbers of those rows that share a scale, 0 for all; codes: how many each row has.
    """

    x: Tensor
    n: int
    k: int
    block: int | None = None
    codes: int = 0

    def arguments(self) -> tuple[Tensor, int, int, int, int, int, int, bool]:
        """Return the kernels' first arguments, and whether x is rows."""
        along_n, along_k = self.x.stride()
        if self.block is not None:
            along_n, along_k = 1, along_k * self.x.stride(0)
        sharing = (self.block or self.codes) if self.block is not None else 1
        return self.x, self.n, self.k, along_n, along_k, self.codes, sharing, self.block is not None


def row_scales(given: Numbers, block: int, form: Codes) -> Tensor:
    """Return bytes [n, k / block], or [n, 1] for block 0."""
    *sizes, rows = given.arguments()
    blocks = given.k // block if block else 1
    out = torch.empty((given.n, blocks), dtype=torch.uint8, device=given.x.device)
    grid = (triton.cdiv(given.n, ROWS), triton.cdiv(given.k, STEP) if block else 1)
    row_scales_kernel[grid](
        *sizes, out, FROM_ROWS=rows, BLOCK=block, FRACTION=form.fraction, BIAS=form.bias,
        SHIFT=form.shift, ROWS=ROWS, STEP=STEP, num_warps=WARPS,
    )  # fmt: skip
    return out


def encode(given: Numbers, scales: Tensor, length: int, form: Codes) -> Tensor:
    """Return rows [n, length], uint8: scales [n, blocks], whose strides may be 0."""
    *sizes, rows = given.arguments()
    blocks = scales.shape[1]
    out = torch.empty((given.n, length), dtype=torch.uint8, device=given.x.device)
    encode_kernel[(triton.cdiv(given.n, ROWS), triton.cdiv(given.k, STEP))](
        *sizes, scales, *scales.stride(), out, length, blocks, FROM_ROWS=rows,
        BLOCK=given.k // blocks if blocks > 1 else 0, FRACTION=form.fraction, BIAS=form.bias,
        TOP=form.top, ROWS=ROWS, STEP=STEP, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def read(
    x, at, i, j, inside, along_k, codes, sharing,
    FROM_ROWS: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return x[i, j] in fp32: of rows, code i of row j times its scale."""
    if not FROM_ROWS:
        return tl.load(x + at, inside, 0.0).to(tl.float32)
    code = tl.load(x + at, inside, 0).to(tl.int32)
    byte = tl.load(x + j.to(tl.int64) * along_k + codes + i // sharing, inside, 0).to(tl.int32)
    size = code & 0x7F
    normal = ((size << (23 - FRACTION)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    number = tl.where(
        size >> FRACTION > 0, normal, size.to(tl.float32) * 2.0 ** (1 - BIAS - FRACTION)
    )
    number = tl.where(size > (0x7E if FRACTION == 3 else 0x7B), float("nan"), number)
    signed = number.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)  # of a zero, too
    return signed.to(tl.float32, bitcast=True) * (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_scales_kernel(
    x, n, k, along_n, along_k, codes, sharing, out,
    FROM_ROWS: tl.constexpr, BLOCK: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    SHIFT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write bytes of a tile's blocks, or of whole rows: the maximum of the numbers' bits."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    first = tl.program_id(1) * STEP
    end = k if BLOCK == 0 else tl.minimum(first + STEP, k)
    most = tl.zeros((ROWS, STEP), tl.int32)
    for start in range(first, end, STEP):
        j = (start + tl.arange(0, STEP))[None, :]
        at = i.to(tl.int64) * along_n + j.to(tl.int64) * along_k
        number = read(
            x, at, i, j, (i < n) & (j < k), along_k, codes, sharing, FROM_ROWS, FRACTION, BIAS
        )
        most = tl.maximum(most, number.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    groups: tl.constexpr = STEP // BLOCK if BLOCK else 1
    top = tl.max(tl.reshape(most, (ROWS, groups, STEP // groups)), 2)
    byte = tl.maximum(((top + 0x1FFFFF) >> 23) - SHIFT, 1)
    byte = tl.where(top >= 0x7F800000, 255, byte)
    blocks = k // BLOCK if BLOCK else 1
    column = (tl.program_id(1) * groups + tl.arange(0, groups))[None, :]
    tl.store(out + i * blocks + column, byte.to(tl.uint8), (i < n) & (column < blocks))


@triton.jit
def encode_kernel(
    x, n, k, along_n, along_k, codes, sharing, scales, scales_n, scales_k, out, length, blocks,
    FROM_ROWS: tl.constexpr, BLOCK: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr,
    TOP: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the codes of a tile; the first tile of a row also writes what stands behind them."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    j = (tl.program_id(1) * STEP + tl.arange(0, STEP))[None, :]
    inside = (i < n) & (j < k)
    at = i.to(tl.int64) * along_n + j.to(tl.int64) * along_k
    number = read(x, at, i, j, inside, along_k, codes, sharing, FROM_ROWS, FRACTION, BIAS)
    group = j // BLOCK if BLOCK else j * 0
    byte = tl.load(scales + i * scales_n + group * scales_k, inside, 1).to(tl.int32)
    inverse = (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)
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
    code = tl.where(not_a_number, 0x7F, code) | ((bits >> 24) & 0x80)
    row = out + i.to(tl.int64) * length
    tl.store(row + j, code.to(tl.uint8), inside)
    if tl.program_id(1) == 0:
        for start in range(k, length, STEP):
            column = (start + tl.arange(0, STEP))[None, :]
            real = (i < n) & (column < k + blocks)
            tail = tl.load(scales + i * scales_n + (column - k) * scales_k, real, 0)
            tl.store(row + column, tail.to(tl.uint8), (i < n) & (column < length))
