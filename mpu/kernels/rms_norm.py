# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of rows, fused with the preceding residual add: one pass forward, one backward.

    forward    h = x + added;  r = 1 / sqrt(mean(h^2) + eps);  y = h r w
    backward   p = dy h;  dx = r (dy w) - h r^3 (p . w) / width + dh;  dw = sum over rows of r p

Rows are cut into at most PARTS runs, which depend only on the number of rows. A program sums dw
over its run in registers; `fold_kernel` sums the runs. So the order of the sum is the same on every
GPU.

Rows longer than WIDEST do not fit registers. A program processes such a row twice, LONG elements at
a time, the second time from the cache, and sums dw in its part, in the same order of rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import Cost, declared, passes
from mpu.kernels.launch import cdiv, next_power_of_2

PARTS = 512
TILE = 8192  # bytes of each operand that a program holds, unless a row is longer
WIDEST = {torch.bfloat16: 8192, torch.float32: 8192, torch.float64: 4096}
LONG = 1024
FOLD_ROWS, FOLD_COLUMNS = 64, 32


def forward_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: one pass; h is written only if something was added."""
    return passes("x added w", "h y inverse" if a["ADD"] else "y inverse")(a)


def fold_cost(a: Mapping[str, Any]) -> Cost:
    """Return the cost: the parts are read, and the gradient is written, and read unless fresh."""
    once = passes("parts", "main")(a)
    if a["FRESH"]:
        return once
    return once._replace(bytes=once.bytes + a["main"].nbytes, adds=("main",))


forward_declared = declared(
    forward_cost, x="whole same", added="whole same", w="whole same", h="whole same",
    y="whole same", inverse="whole sums",
)  # fmt: skip
backward_declared = declared(
    passes("h w inverse dy dh", "dx parts"), h="whole same", w="whole same", inverse="whole sums",
    dy="whole same", dh="whole same", dx="whole same", parts="whole sums",
)  # fmt: skip


@forward_declared
@triton.jit
def norm_forward_kernel(
    x, added, w, h, y, inverse, rows, width, EPS: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """h = x + added, rounded as it is stored, and y = norm(h); without ADD h is x, not stored."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    value = tl.load(x + at, inside, 0.0)
    if ADD:
        value = value.to(WIDE) + tl.load(added + at, inside, 0.0).to(WIDE)
        value = value.to(x.dtype.element_ty)
        tl.store(h + at, value, inside)
    value = value.to(WIDE)
    r = tl.rsqrt(tl.sum(value * value, 1) / width + EPS)
    tl.store(inverse + row, r, row < rows)
    weight = tl.load(w + column, column < width, 0.0).to(WIDE)
    tl.store(y + at, (value * r[:, None] * weight[None, :]).to(y.dtype.element_ty), inside)


@backward_declared
@triton.jit
def norm_backward_kernel(
    h, w, inverse, dy, dh, dx, parts, rows, width, run, ADD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute dx of a run of rows, plus dh if ADD, and the run's part of dw."""
    WIDE: tl.constexpr = tl.float64 if h.dtype.element_ty == tl.float64 else tl.float32
    column = tl.arange(0, COLUMNS)
    dw = tl.zeros((ROWS, COLUMNS), WIDE)
    first = tl.program_id(0).to(tl.int64) * run
    end = tl.minimum(first + run, rows)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        value = tl.load(h + at, inside, 0.0).to(WIDE)
        grad = tl.load(dy + at, inside, 0.0).to(WIDE)
        r = tl.load(inverse + row, row < end, 0.0)[:, None]
        # the same for all rows, but reread from the cache to save registers
        weight = tl.load(w + column, column < width, 0.0).to(WIDE)[None, :]
        p = grad * value
        dw += p * r
        pull = tl.sum(p * weight, 1)[:, None] * r * r * r / width
        out = grad * weight * r - value * pull
        if ADD:
            out += tl.load(dh + at, inside, 0.0).to(WIDE)
        tl.store(dx + at, out.to(dx.dtype.element_ty), inside)
    place = tl.program_id(0).to(tl.int64) * width + column
    tl.store(parts + place, tl.sum(dw, 0), column < width)


@forward_declared
@triton.jit
def norm_forward_long_kernel(
    x, added, w, h, y, inverse, rows, width, EPS: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same as norm_forward_kernel, with rows in several pieces."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, COLUMNS), WIDE)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        value = tl.load(x + at, inside, 0.0)
        if ADD:
            value = value.to(WIDE) + tl.load(added + at, inside, 0.0).to(WIDE)
            value = value.to(x.dtype.element_ty)
            tl.store(h + at, value, inside)
        squares += value.to(WIDE) * value.to(WIDE)
    r = tl.rsqrt(tl.sum(squares, 1) / width + EPS)
    tl.store(inverse + row, r, row < rows)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        value = tl.load(h + at, inside, 0.0).to(WIDE)  # as written by this thread, or x
        weight = tl.load(w + column, column < width, 0.0).to(WIDE)
        tl.store(y + at, (value * r[:, None] * weight[None, :]).to(y.dtype.element_ty), inside)


@backward_declared
@triton.jit
def norm_backward_long_kernel(
    h, w, inverse, dy, dh, dx, parts, rows, width, run, ADD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same as norm_backward_kernel, with rows in several pieces."""
    WIDE: tl.constexpr = tl.float64 if h.dtype.element_ty == tl.float64 else tl.float32
    first = tl.program_id(0).to(tl.int64) * run
    end = tl.minimum(first + run, rows)
    for begin in range(first, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        r = tl.load(inverse + row, row < end, 0.0)[:, None]
        pulls = tl.zeros((ROWS, COLUMNS), WIDE)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = (row < end)[:, None] & (column < width)[None, :]
            at = row[:, None] * width + column[None, :]
            value = tl.load(h + at, inside, 0.0).to(WIDE)
            grad = tl.load(dy + at, inside, 0.0).to(WIDE)
            pulls += grad * value * tl.load(w + column, column < width, 0.0).to(WIDE)[None, :]
        pull = tl.sum(pulls, 1)[:, None] * r * r * r / width
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = (row < end)[:, None] & (column < width)[None, :]
            at = row[:, None] * width + column[None, :]
            value = tl.load(h + at, inside, 0.0).to(WIDE)
            grad = tl.load(dy + at, inside, 0.0).to(WIDE)
            weight = tl.load(w + column, column < width, 0.0).to(WIDE)[None, :]
            out = grad * weight * r - value * pull
            if ADD:
                out += tl.load(dh + at, inside, 0.0).to(WIDE)
            tl.store(dx + at, out.to(dx.dtype.element_ty), inside)
            place = parts + tl.program_id(0).to(tl.int64) * width + column
            before = tl.load(place, column < tl.where(begin > first, width, 0), 0.0)
            tl.store(place, before + tl.sum(grad * value * r, 0), column < width)


@declared(fold_cost, parts="whole", main="whole")
@triton.jit
def fold_kernel(
    parts, main, count, width, FRESH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """main [width] = (main unless FRESH) + the sum of parts [count, width], in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), parts.dtype.element_ty)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < width)[None, :]
        total += tl.load(parts + row[:, None] * width + column[None, :], inside, 0.0)
    value = tl.sum(total, 0)
    if not FRESH:
        value += tl.load(main + column, column < width, 0.0).to(value.dtype)
    tl.store(main + column, value.to(main.dtype.element_ty), column < width)


def is_long(x: Tensor) -> bool:
    """Return whether rows of x are longer than a program holds."""
    return x.shape[-1] > WIDEST[x.dtype]


def tile_of(x: Tensor) -> dict[str, int]:
    """Return the rows and columns of x that a program holds at once, and its warps."""
    if is_long(x):
        return dict(ROWS=2, COLUMNS=LONG, num_warps=8)
    columns = next_power_of_2(x.shape[-1])
    warps = columns // 512 if columns > 4096 and x.itemsize == 2 else 8
    return dict(ROWS=max(1, TILE // columns // x.itemsize), COLUMNS=columns, num_warps=warps)


def norm_forward(
    x: Tensor, added: Tensor | None, w: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, h = x + added (x itself without it), and r [..., 1] in the dtype of sums."""
    width, tile = x.shape[-1], tile_of(x)
    rows = x.numel() // width
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y, inverse = torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=wide)
    h = x if added is None else torch.empty_like(x)
    kernel = norm_forward_long_kernel if is_long(x) else norm_forward_kernel
    kernel.launch(
        (cdiv(rows, tile["ROWS"]),),
        x=x, added=added, w=w, h=h, y=y, inverse=inverse, rows=rows, width=width, EPS=eps,
        ADD=added is not None, **tile,
    )  # fmt: skip
    return y, h, inverse


def norm_backward(
    h: Tensor, w: Tensor, inverse: Tensor, dy: Tensor, dh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return dx, to which dh is added if given, and dw's parts [count, width]: see `fold`."""
    width, tile = h.shape[-1], tile_of(h)
    rows = h.numel() // width
    tiles = max(1, cdiv(cdiv(rows, tile["ROWS"]), PARTS))  # of a run; experts may have no rows
    run = tiles * tile["ROWS"]
    count = cdiv(rows, run)
    dx, parts = torch.empty_like(h), h.new_empty((count, width), dtype=inverse.dtype)
    kernel = norm_backward_long_kernel if is_long(h) else norm_backward_kernel
    kernel.launch(
        (count,),
        h=h, w=w, inverse=inverse, dy=dy, dh=dh, dx=dx, parts=parts, rows=rows, width=width,
        run=run, ADD=dh is not None, **tile,
    )  # fmt: skip
    return dx, parts


def fold(parts: Tensor, main: Tensor, fresh: bool) -> None:
    """Add the sum of parts [count, width] to main [width], or overwrite it if `fresh`."""
    count, width = parts.shape
    fold_kernel.launch(
        (cdiv(width, FOLD_COLUMNS),),
        parts=parts, main=main, count=count, width=width, FRESH=fresh, ROWS=FOLD_ROWS,
        COLUMNS=FOLD_COLUMNS,
    )  # fmt: skip
