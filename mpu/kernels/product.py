# SPDX-License-Identifier: Apache-2.0
"""Multiply one tile: block_m rows of x [m, k] with block_n rows of w [n, k], summed in fp32."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.launch import INTERPRETED


@dataclass(frozen=True)
class Blocks:
    """Tile sizes and how a tile is computed."""

    m: int
    n: int
    k: int
    group: int = 8  # row tiles that iterate over the columns together
    warps: int = 4
    stages: int = 3
    programs: int = 3
    tma: bool = False


def choose_blocks(x: Tensor, w: Tensor, m: int, sms_left: int = 0) -> Blocks:
    """Choose blocks for m rows per rank and the device of w, with a program per SM but `sms_left`.

    TMA needs Hopper and 16-byte aligned rows.
    """
    if INTERPRETED:
        return Blocks(16, 16, 16, group=2)
    major = torch.cuda.get_device_properties(w.device).major
    strides = (x.stride(0), max(w.stride()))
    aligned = all(stride * x.itemsize % 16 == 0 for stride in strides) and w.data_ptr() % 16 == 0
    blocks = blocks_for(x.dtype, major, m, aligned)
    return replace(blocks, programs=count_sms(w.device, sms_left))


def count_sms(device: torch.device, left: int) -> int:
    """Return the number of SMs of a GPU minus `left`, at least one."""
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count - left)


def blocks_for(dtype: torch.dtype, major: int, m: int, aligned: bool) -> Blocks:
    """Return the tiles of a dtype on a GPU of compute capability `major` for m rows per rank.

    They are the largest whose sums and addresses fit the registers and a block's shared memory:
    tests/mpu/kernels/test_ahead_of_time.py compiles each and finds no spill. fp32 multiplies
    without tensor cores, and needs more registers.
    """
    # from 12.0 on a block has 99 KB of shared memory, as on Ada; the tiles for TMA need 131 KB
    rows, tma = 64 if m <= 64 else 128, 9 <= major < 12 and aligned
    if dtype == torch.float32:
        return Blocks(128, 64, 16, warps=8, tma=tma)
    if not tma:
        return Blocks(rows, 128, 32, warps=8, stages=4)
    return Blocks(rows, 256, 64, warps=8, stages=3, tma=True)


def constants(blocks: Blocks, w: Tensor) -> dict[str, Any]:
    """Return the keyword arguments that both matmul kernels share."""
    if blocks.tma and not INTERPRETED:
        # the kernel writes descriptors into memory that Triton requests from this allocator
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=w.device)
        )
    # not get_float32_matmul_precision, which raises if this setting was changed by its new name
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    return dict(
        BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_K=blocks.k, GROUP=blocks.group, TMA=blocks.tma,
        ROWS=w.stride(1) == 1, DOT_F32=INTERPRETED, PRECISION="ieee" if exact else "tf32",
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


@triton.jit
def open_rows(x, rows, k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """Return the handle of x [rows, k] for tile_product: a descriptor, or the pointer itself."""
    x = tl.multiple_of(x, 16)
    if TMA:
        return tl.make_tensor_descriptor(x, [rows, k], [k, 1], [BLOCK_M, BLOCK_K])
    else:
        return x


@triton.jit
def open_weight(
    w, n, k, stride_n, stride_k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Return the handle of w [n, k] for tile_product. ROWS: k is the dimension with stride 1."""
    if TMA:
        if ROWS:
            return tl.make_tensor_descriptor(w, [n, k], [stride_n, 1], [BLOCK_N, BLOCK_K])
        else:
            return tl.make_tensor_descriptor(w, [k, n], [stride_k, 1], [BLOCK_K, BLOCK_N])
    else:
        return w


@triton.jit
def tile_product(
    x, w, row, end, column, n, k, stride_n, stride_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr, DOT_F32: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return sum over k of x[row + a, k] w[column + b, k], [BLOCK_M, BLOCK_N] in fp32.

    x, w: from open_rows and open_weight. Rows from `end` and columns from n on are padding, whose
    results are not stored. DOT_F32: multiply in fp32, as the interpreter multiplies bf16 wrongly.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    columns = (column + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    for at in range(0, k, BLOCK_K):
        if TMA:
            a = x.load([row, at])
            b = w.load([column, at]).T if ROWS else w.load([at, column])
        else:
            inner = at + tl.arange(0, BLOCK_K)
            inside = inner < k
            a = tl.load(x + rows * k + inner[None, :], (rows < end) & inside[None, :], 0.0)
            inner = inner.to(tl.int64)[:, None]
            b = tl.load(
                w + columns * stride_n + inner * stride_k, (columns < n) & inside[:, None], 0.0
            )
        if DOT_F32:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total
