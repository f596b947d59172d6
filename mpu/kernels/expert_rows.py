# SPDX-License-Identifier: Apache-2.0
"""Combine a token's rows from its experts, and the backward of that: one pass each.

    T tokens   k experts per token   n rows here   place [T, k]: the row of each pair, n or more if
                                                   it is on another rank or was dropped

    sum_rows           y_t = sum over j of w_tj rows[place_tj], in the order of j; w is 1 if None
    combine_backward   drows[place_tj] = w_tj dy_t,   dw_tj = dy_t . rows[place_tj]

torch's operations (mpu/layers/dispatch.py) need k times a copy of T rows in bf16, one in fp32, a
product and a sum. Sums are fp32, fp64 for fp64. Each token is handled by one program, so no two
programs add to the same element.
"""

import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import declared, passes
from mpu.kernels.launch import cdiv, next_power_of_2

WIDEST, WARPS = 2048, 4  # elements of a row at a time: with 4096 backward spills on sm_100


@declared(
    passes("rows place weights", "out"), rows="whole", place="whole", weights="whole", out="whole"
)
@triton.jit
def sum_rows_kernel(rows, place, weights, out, n, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, width] of rows [n, width]; place, weights [T, K], weights None: 1."""
    WIDE: tl.constexpr = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], WIDE)
    for j in tl.static_range(K):
        row = tl.load(place + token * K + j)
        here = at < tl.where(row < n, width, 0)
        x = tl.load(rows + row * width + at, here, 0.0).to(WIDE)
        if weights is not None:
            x *= tl.load(weights + token * K + j)
        total += x
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), inside)


@declared(
    passes("rows place weights dy", "drows dweights"), rows="whole", place="whole", weights="whole",
    dy="whole", drows="whole", dweights="whole",
)  # fmt: skip
@triton.jit
def combine_backward_kernel(
    rows, place, weights, dy, drows, dweights, n, width, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """drows [n, width] and dweights [T, K] of dy [T, width]."""
    WIDE: tl.constexpr = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    token = tl.program_id(0).to(tl.int64)
    for j in tl.static_range(K):
        row = tl.load(place + token * K + j)
        weight, own = tl.load(weights + token * K + j), tl.where(row < n, width, 0)
        dots = tl.zeros([BLOCK], WIDE)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            here = at < own
            grad = tl.load(dy + token * width + at, at < width, 0.0).to(WIDE)
            dots += grad * tl.load(rows + row * width + at, here, 0.0).to(WIDE)
            tl.store(drows + row * width + at, (grad * weight).to(drows.dtype.element_ty), here)
        tl.store(dweights + token * K + j, tl.sum(dots, 0))


def block_of(width: int) -> int:
    """Return how many elements of a row a program handles at a time."""
    return int(min(WIDEST, next_power_of_2(width)))


def sum_rows(rows: Tensor, place: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Fill out [T, h] from rows [n, h], place [T, k] and weights [T, k]; all contiguous."""
    (tokens, k), width = place.shape, out.shape[1]
    if tokens:
        block = block_of(width)
        sum_rows_kernel.launch(
            (tokens, cdiv(width, block)),
            rows=rows, place=place, weights=weights, out=out, n=len(rows), width=width,
            K=k, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip


def combine_backward(
    rows: Tensor, place: Tensor, weights: Tensor, dy: Tensor, drows: Tensor, dweights: Tensor
) -> None:
    """Fill dweights [T, k], and the rows of drows [n, h] that have a pair; all contiguous."""
    (tokens, k), width = place.shape, dy.shape[1]
    if tokens:
        combine_backward_kernel.launch(
            (tokens,),
            rows=rows, place=place, weights=weights, dy=dy, drows=drows, dweights=dweights,
            n=len(rows), width=width, K=k, BLOCK=block_of(width), num_warps=WARPS,
        )  # fmt: skip
