# SPDX-License-Identifier: Apache-2.0
"""Add the parts that the ranks of an axis sent, in one pass: each is read once.

out = parts[0] + parts[1] + ..., left to right, in fp32 (fp64 for fp64), rounded once: the same bits
as mpu.comm.collectives.sum_of_parts, which needs a launch per part and keeps its sum in memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import declared, passes
from mpu.kernels.launch import cdiv

BLOCK, WARPS = 1024, 4


@declared(passes("parts", "out"), parts="whole", out="whole")
@triton.jit
def sum_of_parts_kernel(parts, out, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum out [n] of parts [COUNT, n]."""
    WIDE: tl.constexpr = tl.float64 if parts.dtype.element_ty == tl.float64 else tl.float32
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    part = parts + at
    total = tl.load(part, inside, 0.0).to(WIDE)
    for _ in tl.static_range(1, COUNT):
        part += n
        total += tl.load(part, inside, 0.0).to(WIDE)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)


def sum_of_parts(parts: Tensor, out: Tensor) -> None:
    """Fill out [...] with the sum of parts [t, ...]; both contiguous."""
    n = out.numel()
    assert parts.is_contiguous() and out.is_contiguous() and parts.numel() == len(parts) * n
    grid = (cdiv(n, BLOCK),)
    sum_of_parts_kernel.launch(grid, parts, out, n, COUNT=len(parts), BLOCK=BLOCK, num_warps=WARPS)
