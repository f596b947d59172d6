# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of rows of logits: the softmax statistics in one pass, and the gradient in place.

    softmax_stats      one program per row: reads the logits once
    softmax_gradient   one program per piece of a row: reads and writes them once

Logits are read in their own dtype and computed in fp32, so no fp32 copy of them exists. Columns
from `real` on are padding. `first` is the vocabulary index of column 0: a label outside of these
columns belongs to another rank, or to another chunk.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import Cost, declared
from mpu.kernels.launch import cdiv

LOWEST = tl.constexpr(-3.0e38)  # below every logit, and finite, as inf - inf is NaN
BLOCK, WARPS = 4096, 8  # columns and warps of a program


def softmax_stats(rows: Tensor, labels: Tensor, first: int, real: int, out: Tensor) -> None:
    """Write out [3, n] in fp32: each row's maximum, sum of exp(l - maximum), and label's logit.

    rows [n, width], labels [n] in int64. The logit is 0 if the label is not in these columns.
    """
    n, width = rows.shape
    softmax_stats_kernel.launch(
        (n,), rows, labels, out, n, width, first, real, BLOCK=BLOCK, num_warps=WARPS
    )


def softmax_gradient(
    rows: Tensor, labels: Tensor, first: int, real: int, log_sum: Tensor, weight: Tensor
) -> None:
    """Write weight (exp(l - log_sum) - [column is the label]) over rows [n, width], 0 for padding.

    log_sum, weight: [n] in fp32.
    """
    n, width = rows.shape
    softmax_gradient_kernel.launch(
        (n, cdiv(width, BLOCK)), rows, labels, log_sum, weight, width, first, real, BLOCK=BLOCK,
        num_warps=WARPS,
    )  # fmt: skip


def stats_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: logits are read once; three numbers per row are written."""
    n, size = a["n"], a["rows"].element_size()
    return Cost(n * (a["real"] * size + 8 + 3 * 4), 0.0, ("out",))


def gradient_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: logits are read and overwritten by their gradient."""
    n, width = a["rows"].shape
    return Cost(n * ((a["real"] + width) * a["rows"].element_size() + 8 + 2 * 4), 0.0, ("rows",))


@declared(stats_cost, rows="whole same", labels="whole int64", out="whole sums")
@triton.jit
def softmax_stats_kernel(rows, labels, out, n, width, first, real, BLOCK: tl.constexpr):
    """Keep a running maximum and the sum relative to it; a new maximum rescales the sum."""
    row = tl.program_id(0)
    here = rows + row.to(tl.int64) * width
    top = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    for at in range(0, real, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        logits = tl.load(here + columns, columns < width, 0.0).to(tl.float32)
        logits = tl.where(columns < real, logits, -float("inf"))
        peak = tl.maximum(top, tl.max(logits, 0))
        total = total * tl.exp(top - peak) + tl.sum(tl.exp(logits - peak), 0)
        top = peak
    column = tl.load(labels + row) - first
    chosen = tl.load(here + column, (column >= 0) & (column < real), 0.0).to(tl.float32)
    tl.store(out + row, top)
    tl.store(out + n + row, total)
    tl.store(out + 2 * n + row, chosen)


@declared(
    gradient_cost, rows="whole same", labels="whole int64", log_sum="whole sums",
    weight="whole sums",
)  # fmt: skip
@triton.jit
def softmax_gradient_kernel(
    rows, labels, log_sum, weight, width, first, real, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = rows + row.to(tl.int64) * width + columns
    logits = tl.load(here, columns < width, 0.0).to(tl.float32)
    share = tl.exp(logits - tl.load(log_sum + row))
    share = tl.where(columns == tl.load(labels + row) - first, share - 1.0, share)
    share = tl.where(columns < real, share * tl.load(weight + row), 0.0)
    tl.store(here, share.to(rows.dtype.element_ty), columns < width)
