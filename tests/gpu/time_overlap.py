#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time the overlap kernels at shapes of tensor parallel 8 on one GPU, against cuBLAS.

    python tests/gpu/time_overlap.py [--small]

One process plays a rank whose peers' rows have come already (tests/gpu/alone.py), so this is
the kernels' own time: multiplying tiles, flags, stores to memory of this GPU. No link takes part.
Each is timed alone and beside a kernel that holds SMs, as NCCL does. --small: small shapes, once,
for compute-sanitizer.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as a script, find mpu

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.gpu.alone import as_rank, raise_all  # noqa: E402

WORLD, HELD = 8, (0, 16, 32)  # SMs that another kernel holds
# name: (gathers, rows of a rank, width of x, outputs of a rank), Llama 3 70B, 8,192 tokens
SHAPES = {
    "qkv": (True, 1024, 8192, 1280),
    "gate and up": (True, 1024, 8192, 7168),
    "proj": (False, 1024, 1024, 8192),
    "down": (False, 1024, 3584, 8192),
}
SMALL = {"gather": (True, 192, 256, 128), "scatter": (False, 192, 256, 384)}


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply with cuBLAS."""
    return torch.nn.functional.linear(x, weight)


def operations(
    gathers: bool, rows: int, k: int, n: int, device: torch.device
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return (overlapped, cuBLAS alone): functions that start one multiplication each.

    gathers: x [rows, k] of each rank, gathered, times w [n, k]; else x [8 rows, k] times w [n, k],
    summed over the ranks. Call it inside of `as_rank`, whose workspace is used from then on.
    """
    from mpu.comm.symmetric_cuda import CudaSymmetricTransport
    from mpu.overlap.cuda import KernelOverlap

    with as_rank(0, WORLD, device) as workspace:
        axis = replace(workspace.axis, transport=CudaSymmetricTransport(None, workspace))
        method = KernelOverlap(axis)
        whole = torch.randn(WORLD * rows, k, dtype=torch.bfloat16, device=device)
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)

        def overlapped() -> None:
            if gathers:
                gathering = method.start_all_gather(whole[:rows], None)
                gathering.multiply(weight, product)
                gathering.close()
            else:
                method.matmul_reduce_scatter(whole, weight, product, None)[1].wait()

        workspace.begin(rows * max(k, n) * whole.itemsize).close()  # grows the slots; flags are 0
        raise_all(workspace)
        overlapped()
    return overlapped, lambda: (product(whole, weight), None)[1]


def seconds(run: Callable[[], None], held: int, device: torch.device, repeat: int = 20) -> float:
    """Return the median seconds of one run while another kernel holds `held` SMs."""
    from tests.gpu.hog import hog

    side, spent = torch.cuda.Stream(device), []
    for _ in range(repeat):
        run()
        torch.cuda.synchronize(device)
        if held:
            with torch.cuda.stream(side):
                hog(held, 20e-3, device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(100_000)  # the hog has begun by the time that the first kernel starts
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        spent.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(spent)


def main(small: bool) -> int:
    """Print one line a projection."""
    device = torch.device("cuda", 0)
    for name, shape in (SMALL if small else SHAPES).items():
        overlapped, cublas = operations(*shape, device)
        if small:
            torch.cuda.synchronize(device)
            print(f"{name}: ran")
            continue
        _, rows, k, n = shape
        flops, cells = 2.0 * WORLD * rows * k * n, []
        for held in HELD:
            ours, alone = (seconds(run, held, device) for run in (overlapped, cublas))
            cells.append(
                f"{held} SMs held: {ours * 1e6:.0f} us, {flops / ours / 1e12:.0f} TFLOP/s; cuBLAS "
                f"{alone * 1e6:.0f} us; ours / cuBLAS {ours / alone:.2f}"
            )
        print(f"{name} [{WORLD * rows}, {k}] x [{k}, {n}]: " + "\n    ".join(cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main("--small" in sys.argv))
