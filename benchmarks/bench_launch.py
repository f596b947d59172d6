# SPDX-License-Identifier: Apache-2.0
"""Time the Python code of a Triton launch, by Triton itself and by mpu/kernels/launch.py.

    python benchmarks/bench_launch.py

Nothing is launched: the driver's functions are replaced by ones that do nothing, so this runs on
any machine, and the time of the driver and of Triton's C code is left out. Each kernel is called as
in the product, with small tensors. "call" is the whole call of the product, including the code
before the launch.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from mpu.kernels import (  # noqa: E402
    cross_entropy,
    expert_rows,
    float8,
    grouped_wgrad,
    rms_norm,
    rope,
    sum_of_parts,
    swiglu,
    swiglu_rows,
)
from mpu.kernels.launch import Kernel  # noqa: E402

CALLS, ROUNDS = 300, 15
BF16 = torch.bfloat16


class Driver:
    """Replaces a Hopper's driver: kernels are compiled for it, and launches do nothing."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] | None = None  # arguments of launches, if recorded
        limits = {"max_shared_mem": 232448}
        self.utils = SimpleNamespace(
            load_binary=lambda name, code, *about: (1, (name, crc32(code)), 32, 0, 1024),
            get_device_properties=lambda device: limits,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return the function that launches a kernel."""

        def launch(*given: Any) -> None:
            if self.launched is not None:
                self.launched.append(given)

        return launch

    def get_current_target(self) -> GPUTarget:
        """Return the target of compilation."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the GPU's number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the stream's address."""
        return 0


@contextmanager
def stand_in() -> Iterator[Driver]:
    """Replace Triton's driver by a Driver."""
    active, made = driver._active, Driver()
    driver.set_active(made)
    try:
        yield made
    finally:
        driver._active = active


def by_triton(kernel: Kernel, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """Launch by Triton's `kernel[grid](...)`, instead of Kernel.launch."""
    kernel.jitted[grid](*args, **named)


def calls() -> dict[str, Callable[[], object]]:
    """Return a call of the product for each kernel, by the kernel's name."""
    x, w, r = torch.ones(16, 64, dtype=BF16), torch.ones(64, dtype=BF16), torch.ones(16, 1)
    parts, main = torch.ones(2, 64), torch.ones(64)
    qkv, angles = torch.ones(4, 2, 6, 16, dtype=BF16), torch.ones(4, 1, 1, 8)
    slices = qkv.split([4, 1, 1], 2)
    wide_x = torch.ones(16, 256, dtype=BF16)
    labels, sums = torch.zeros(16, dtype=torch.int64), torch.ones(3, 16)
    place, shares = torch.zeros(16, 2, dtype=torch.int64), torch.ones(16, 2)
    given, form = (
        float8.Numbers(torch.ones(16, 128, dtype=BF16), 16, 128),
        float8.Codes(3, 7, 448.0, 8),
    )
    ends, main_grads = torch.tensor([4, 16], dtype=torch.int32), torch.ones(2, 64, 64)
    out, byte = torch.zeros(16, 144, dtype=torch.uint8), torch.ones(16, 1, dtype=torch.uint8)
    return {
        "swiglu_forward": lambda: swiglu.swiglu_forward(x),
        "swiglu_backward": lambda: swiglu.swiglu_backward(x, x[:, :32]),
        "norm_forward": lambda: rms_norm.norm_forward(x, x, w, 1e-5),
        "norm_backward": lambda: rms_norm.norm_backward(x, w, r, x, x),
        "fold": lambda: rms_norm.fold(parts, main, False),
        "rope": lambda: rope.rope(slices, angles, angles, qkv, copy=False),
        "softmax_stats": lambda: cross_entropy.softmax_stats(x, labels, 0, 64, sums),
        "softmax_gradient": lambda: cross_entropy.softmax_gradient(
            x, labels, 0, 64, sums[0], sums[1]
        ),
        "sum_of_parts": lambda: sum_of_parts.sum_of_parts(parts, main),
        "sum_rows": lambda: expert_rows.sum_rows(x, place, shares, x),
        "combine_backward": lambda: expert_rows.combine_backward(x, place, shares, x, x, shares),
        "grouped_wgrad": lambda: grouped_wgrad.grouped_wgrad(x, x, ends, main_grads, False),
        "swiglu_rows": lambda: swiglu_rows.swiglu_rows(
            wide_x, None, byte[0], 0, out=out, turned=None, wide=None, form=form
        ),
        "float8 row_scales": lambda: float8.row_scales(given, 0, byte, form),
        "float8 encode": lambda: float8.encode(given, byte, out, None, form),
        "float8 rows": lambda: float8.rows(given, 128, out, None, form, False),
    }


def microseconds(*calls: Callable[[], object]) -> list[float]:
    """Return the least time of each call over all rounds; the calls alternate."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[i] = min(best[i], (time.perf_counter() - begin) / CALLS * 1e6)
    return best


def launch_of(call: Callable[[], object]) -> Callable[..., None]:
    """Return a function that repeats a call's launch by a replacement of Kernel.launch."""
    seen: list[Callable[..., None]] = []

    def note(kernel: Kernel, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        seen.append(lambda launch: launch(kernel, grid, *args, **named))

    with mock.patch.object(Kernel, "launch", note):
        call()
    (again,) = seen
    return again


def main() -> None:
    """Print a line for each kernel."""
    print("us of Python:             launch: Triton   ours         call: before   after")
    worst, ours = 0.0, Kernel.launch
    for name, call in calls().items():
        again = launch_of(call)
        before, after = microseconds(partial(again, by_triton), partial(again, ours))
        with mock.patch.object(Kernel, "launch", by_triton):
            (whole,) = microseconds(call)
        (now,) = microseconds(call)
        worst = max(worst, after / before)
        print(
            f"{name:26s}{before:14.1f}{after:7.1f}  {after / before:5.2f}{whole:14.1f}{now:8.1f}"
            f"  {now / whole:5.2f}"
        )
    print(f"largest time of a launch, relative to Triton's own: {worst:.2f}")


if __name__ == "__main__":
    with stand_in():
        main()
