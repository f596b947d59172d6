# SPDX-License-Identifier: Apache-2.0
"""Measure all_gather_matmul and matmul_reduce_scatter against the bare local matmul.

    python benchmarks/bench_matmul.py [--rows 1024] [--dtype fp32 bf16] [--shapes qkv proj ...]
    sudo python benchmarks/bench_matmul.py --link 1gbit       over a slow link (Linux, iproute2)

Two ranks of one thread run the projections of Llama 3 8B at tp 2. `bare` is the matmul alone, on
whole inputs, on both ranks at once. Each overlap method is printed in milliseconds and as a ratio
to `bare`. The methods alternate; a figure is the median over the rounds, of the slower rank.

Over a link the full tensor is 16 MiB (fp32, 1024 rows of 4096), and a method has 3 more numbers:

    hidden = 1 - (method - bare) / communication      communication: the collective alone
    E      = 1 - (method - bare) / (none - bare)      none: matmul and collective in sequence
    ideal  = max(bare, communication + bare / 2)      a rank multiplies its own chunk first
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_pipeline import Link  # noqa: E402
from benchmarks.bench_step import command, environment  # noqa: E402
from mpu.comm.collectives import all_gather, barrier, gather_bytes, reduce_scatter  # noqa: E402
from mpu.connect import share  # noqa: E402
from mpu.context import LayerContext  # noqa: E402
from mpu.grid import Grid, Launch  # noqa: E402
from mpu.layers.linear import (  # noqa: E402
    ColumnParallelLinear,
    Recipe,
    RowParallelLinear,
    use_overlap,
)
from mpu.overlap.choices import METHODS, OverlapMap  # noqa: E402

SHAPES = {  # op, k and o on one of two ranks
    "qkv": ("gather", 4096, 3072),
    "proj": ("scatter", 2048, 4096),
    "gate_up": ("gather", 4096, 14336),
    "down": ("scatter", 7168, 4096),
}
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", metavar="RATE", help="as tc writes it: 1gbit")
    parser.add_argument("--rows", type=int, default=1024, help="of the whole input (1024)")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtype", nargs="+", default=["fp32"], choices=KINDS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)  # where rank 0 writes
    args = parser.parse_args()
    if args.found:
        return measure(args)
    words = [__file__, "--rows", str(args.rows), "--rounds", str(args.rounds)]
    words += ["--shapes", *args.shapes, "--dtype", *args.dtype]
    words += ["--link", args.link] if args.link else []
    with (
        tempfile.TemporaryDirectory() as folder,
        Link(args.link, "256kb") if args.link else (nullcontext()) as link,
    ):
        words += ["--found", str(Path(folder) / "found.json")]
        if link is None:
            subprocess.run([*command(2), *words], check=True, env=environment(2), cwd=ROOT)
        else:
            link.run([sys.executable, *words])
        for row in json.loads((Path(folder) / "found.json").read_text()):
            tell(row, bool(args.link))


def tell(row: dict[str, Any], link: bool) -> None:
    """Print a line for a projection, and over a link another one for each method."""
    ms = {side: 1e3 * s for side, s in row["seconds"].items()}
    bare, message = ms["bare"], ms["communication"]
    sides = [f"{p} {ms[p]:.1f} ({ms[p] / bare:.2f})" for p in METHODS if p in ms]
    print(f"{row['name']:<13} bare {bare:.1f} ms, communication {message:.1f}: {'; '.join(sides)}")
    for path in METHODS if link else ():
        if path in ms and path != "none":
            late, ideal = ms[path] - bare, max(bare, message + bare / 2)
            print(f"{'':<13} {path}: hidden {1 - late / message:.0%}, "
                  f"E {1 - late / (ms['none'] - bare):.2f}, ideal / path "
                  f"{ideal / ms[path]:.2f}")  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """Run one rank: time all sides of each projection, in turns."""
    torch.set_num_threads(1)
    grid, wait = Grid(2, 2, launch=Launch.from_env()), timedelta(minutes=5)
    grid.connect(torch.device("cpu"), None, wait)
    if not args.link:
        share(grid, wait)
    rows = []
    for dtype in args.dtype:
        for name in args.shapes:
            seconds: dict[str, list[float]] = {}
            timed = sides(grid, name, KINDS[dtype], args.rows)
            for _ in range(args.rounds + 1):
                for side, run in timed.items():
                    barrier(grid.tp)
                    begin = time.perf_counter()
                    run()
                    seconds.setdefault(side, []).append(time.perf_counter() - begin)
            middle = {side: statistics.median(each[1:]) for side, each in seconds.items()}
            every = [json.loads(d) for d in gather_bytes(json.dumps(middle).encode(), grid.tp)]
            slower = {side: max(of[side] for of in every) for side in middle}
            rows.append({"name": f"{name} {dtype}", "seconds": slower})
    if grid.rank == 0:
        args.found.write_text(json.dumps(rows))
    grid.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that exits normally


@torch.no_grad()
def sides(grid: Grid, name: str, dtype: torch.dtype, rows: int) -> dict[str, Callable[[], Any]]:
    """Return the timed functions: the bare matmul, its collective, both by each method."""
    op, k, o = SHAPES[name]
    torch.manual_seed(grid.rank)
    x, w = torch.randn(rows, k).to(dtype), torch.randn(o, k).to(dtype)
    ctx, product = LayerContext(grid, True, dtype), Recipe().product
    methods = [m for m in METHODS if m != "symmetric" or grid.tp.symmetric]
    made: dict[str, Callable[[], Any]] = {"bare": lambda: product(x, w)}
    if op == "gather":
        part = x[: rows // 2].contiguous()
        made["communication"] = lambda: all_gather(part, grid.tp)
    else:
        part, y = x, torch.randn(rows, o).to(dtype)
        made["communication"] = lambda: reduce_scatter(y, grid.tp)
    for method in methods:
        layer: ColumnParallelLinear | RowParallelLinear
        if op == "gather":
            layer = ColumnParallelLinear(k, grid.tp.size * o, ctx=ctx)
        else:
            layer = RowParallelLinear(grid.tp.size * k, o, ctx=ctx)
        layer.weight.copy_(w)
        use_overlap(layer, OverlapMap(method))
        made[method] = lambda layer=layer: layer(part)
    return made


if __name__ == "__main__":
    main()
