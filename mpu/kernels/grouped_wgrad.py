# SPDX-License-Identifier: Apache-2.0
"""Weight gradients of all experts of a rank, added in fp32: one launch.

    main[e] [o, i] += dy_e^T x_e     over the rows of expert e, which end at ends[e]

A program computes a tile of one expert's gradient. It sums over the expert's rows in fp32 and adds
the previous gradient last, as an accumulating matmul (mpu/layers/linear.py) does for one expert. An
expert without rows adds nothing; a fresh gradient is then set to zero.

Programs of an expert are consecutive, GROUP tiles of o at a time over all of i, so that they share
its rows in the cache.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import Cost, declared
from mpu.kernels.launch import INTERPRETED, cdiv

TILE_O, TILE_I, STEP, GROUP = 128, 128, 64, 8  # STEP: rows at a time
WARPS, STAGES = 8, 3


def grouped_wgrad(x: Tensor, dy: Tensor, ends: Tensor, main: Tensor, fresh: bool) -> None:
    """Add dy_e^T x_e to main [E, o, i], or overwrite it if `fresh`: x [n, i], dy [n, o], ends int32
    [E] on the device; contiguous.
    """
    experts, o, i = main.shape
    tile = (16, 16, 16) if INTERPRETED else (TILE_O, TILE_I, STEP)
    grouped_wgrad_kernel.launch(
        (experts, cdiv(o, tile[0]) * cdiv(i, tile[1])), x=x, dy=dy, ends=ends, main=main, o=o, i=i,
        FRESH=fresh, TILE_O=tile[0], TILE_I=tile[1], STEP=tile[2], GROUP=GROUP, DOT_F32=INTERPRETED,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: rows are read once; gradients are written, and read unless fresh."""
    n, o, i, main = len(a["x"]), a["o"], a["i"], a["main"].nbytes
    moved = a["x"].nbytes + a["dy"].nbytes + main * (1 if a["FRESH"] else 2)
    return Cost(moved, 2.0 * n * o * i, ("main",), () if a["FRESH"] else ("main",))


@declared(cost, x="half whole", dy="whole same", ends="whole int32", main="whole float32")
@triton.jit
def grouped_wgrad_kernel(
    x, dy, ends, main, o, i, FRESH: tl.constexpr, TILE_O: tl.constexpr, TILE_I: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr, DOT_F32: tl.constexpr,
):  # fmt: skip
    """Compute a tile of main[e]. DOT_F32: the interpreter multiplies bf16 wrongly, so use fp32."""
    expert = tl.program_id(0)
    tiles_o, tiles_i = tl.cdiv(o, TILE_O), tl.cdiv(i, TILE_I)
    first = tl.program_id(1) // (GROUP * tiles_i) * GROUP
    height = tl.minimum(tiles_o - first, GROUP)
    inside = tl.program_id(1) % (GROUP * tiles_i)
    row = (first + inside % height) * TILE_O + tl.arange(0, TILE_O)
    column = inside // height * TILE_I + tl.arange(0, TILE_I)
    begin = tl.load(ends + expert - 1, expert > 0, 0)
    end = tl.load(ends + expert)
    if (end > begin) | FRESH:
        total = tl.zeros((TILE_O, TILE_I), tl.float32)
        for start in range(begin, end, STEP):
            token = start + tl.arange(0, STEP)
            here = token.to(tl.int64)[:, None]
            left = tl.load(
                dy + here * o + row[None, :], (token < end)[:, None] & (row < o)[None, :], 0.0
            )
            right = tl.load(
                x + here * i + column[None, :], (token < end)[:, None] & (column < i)[None, :], 0.0
            )
            if DOT_F32:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
        at = expert.to(tl.int64) * o * i + row.to(tl.int64)[:, None] * i + column[None, :]
        real = (row < o)[:, None] & (column < i)[None, :]
        if not FRESH:
            total += tl.load(main + at, real, 0.0)
        tl.store(main + at, total, real)
