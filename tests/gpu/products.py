# SPDX-License-Identifier: Apache-2.0
"""float8's three products by recipe against the same operands decoded and multiplied in float64.

    forward  y  = x w^T    dgrad  dx = dy w    wgrad  dw = dy^T x, in fp32

What is compared is torch's scaled_mm: its scales, their layouts and its sums. On a CPU the recipe
multiplies decoded operands, so there the row shows that the comparison itself is right.
"""

import torch
from torch import Tensor

from mpu.context import LayerContext
from mpu.layers.float8 import cuda as float8_cuda
from mpu.layers.float8.recipe import Float8
from mpu.layers.float8.rows import BLOCKS, E4M3, decode
from tests.gpu.row import Row, Stopwatch

# bf16 rounds a result by 2^-9; fast sums of Hopper keep 13 bits within a tile
LIMITS = {"forward": 1e-2, "dgrad": 1e-2, "wgrad": 2e-3}


def apart(got: Tensor, want: Tensor) -> float:
    """Return the norm of a difference over that of what is wanted."""
    return ((got.double() - want).norm() / want.norm()).item()


def products(row: Row) -> None:
    """Write the errors of each recipe's products, and the seconds of its products and its rows."""
    torch.manual_seed(1)
    for scaling in BLOCKS:
        for form in ("hybrid", "e4m3"):
            if row.cuda and (why := float8_cuda.unsupported(scaling, row.device)):
                row.say(f"{scaling}, {form}", skipped=why)
                continue
            row.part(f"{scaling}, {form}", lambda s=scaling, f=form: _one(row, s, f))


def _one(row: Row, scaling: str, form: str) -> None:
    n, o, i = (256, 128, 384) if row.tiny else (2048, 4096, 1024)
    recipe = Float8(scaling, form, LayerContext(dtype=torch.bfloat16, device=row.device))
    x, w, dy = (
        torch.randn(shape, device=row.device).bfloat16() for shape in ((n, i), (o, i), (n, o))
    )
    dy *= torch.randn(n, 1, device=row.device).mul(2).exp().bfloat16()  # rows of unlike size
    rows_x, rows_w = recipe.operand(x, "x", "sp"), recipe.operand(w, "w", "rows")
    rows_dy, rows_wt = recipe.operand(dy, "dy", "sp"), recipe.operand(w, "wt", "k")
    main = torch.full((o, i), float("nan"), device=row.device)
    recipe.accumulate(main, True, rows_x, rows_dy)
    recipe.accumulate(main, False, rows_x, rows_dy)
    block = recipe.block
    read = {
        "x": (rows_x, E4M3),
        "w": (rows_w, E4M3),
        "dy": (rows_dy, recipe.dy),
        "wt": (rows_wt, E4M3),
    }
    exact = {name: decode(rows, block, kind, torch.float64) for name, (rows, kind) in read.items()}
    found = {
        "forward": (recipe.product(rows_x, rows_w), exact["x"] @ exact["w"].t()),
        "dgrad": (recipe.dgrad(rows_dy, rows_wt), exact["dy"] @ exact["wt"].t()),
        "wgrad": (main, 2 * exact["dy"].t() @ exact["x"]),
    }
    for product, (got, want) in found.items():
        what = f"{scaling}, {form}: {product}"
        row.check(
            what,
            apart(got, want),
            LIMITS[product],
            of_unquantised=_unquantised(product, got, x, w, dy),
        )
    if not row.tiny:
        _times(row, scaling, form)


def _unquantised(product: str, got: Tensor, x: Tensor, w: Tensor, dy: Tensor) -> float:
    """Return how far a product is from that of the numbers before they became float8."""
    x, w, dy = x.double(), w.double(), dy.double()
    want = {"forward": lambda: x @ w.t(), "dgrad": lambda: dy @ w, "wgrad": lambda: 2 * dy.t() @ x}
    return apart(got, want[product]())


def _times(row: Row, scaling: str, form: str) -> None:
    """Time the products of gate_up and the making of its rows, as a step does them."""
    z, clock = row.sizes, Stopwatch(row)
    n, o, i = z.seq, 2 * z.ffn, z.hidden
    recipe = Float8(scaling, form, LayerContext(dtype=torch.bfloat16, device=row.device))
    x, w, dy = (
        torch.randn(shape, device=row.device).bfloat16() for shape in ((n, i), (o, i), (n, o))
    )
    main = torch.zeros(o, i, device=row.device)
    a, b, c, d = (
        recipe.operand(x, "x", "sp"), recipe.operand(w, "w", "rows"),
        recipe.operand(dy, "dy", "sp"), recipe.operand(w, "wt", "k"),
    )  # fmt: skip
    flops = 2.0 * n * o * i
    for what, run, work in (
        ("rows of x", lambda: recipe.operand(x, "x", "sp"), 0.0),
        ("rows of dy", lambda: recipe.operand(dy, "dy", "sp"), 0.0),
        ("rows of w", lambda: recipe.operand(w, "w", "rows"), 0.0),
        ("rows of w^T", lambda: recipe.operand(w, "wt", "k"), 0.0),
        ("forward", lambda: recipe.product(a, b), flops),
        ("dgrad", lambda: recipe.dgrad(c, d), flops),
        ("wgrad with its rows", lambda: recipe.accumulate(main, False, a, c), flops),
    ):
        row.say(f"{scaling}, {form}, gate_up: {what}", **clock(run).numbers(0, work))
