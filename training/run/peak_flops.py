# SPDX-License-Identifier: Apache-2.0
"""The peak FLOP/s that MFU is relative to: from a GPU's data sheet, or a measured matmul.

Model FLOP/s utilization (MFU) = model FLOP/s / (peak of one rank * ranks).
"""

import time

import torch

from mpu.layers.linear import Recipe
from training.run.gpus import of_driver


def measured_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Return the best FLOP/s of the layers' square matmul, with this process's threads."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, device=device, dtype=dtype)
    b = torch.ones(size, size, device=device, dtype=dtype)
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop or best == float("inf"):
        begin = time.perf_counter()
        Recipe().product(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return one rank's peak FLOP/s and where the number comes from, in words."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        gpu = of_driver(name)
        if gpu is not None and dtype == torch.bfloat16:
            return gpu.bf16, f"the dense bf16 peak of {name} from its data sheet"
        return measured_peak(device, dtype), f"measured here on {name} with a {short(dtype)} matmul"
    threads = torch.get_num_threads()
    source = f"measured here with a {short(dtype)} matmul, {threads} thread(s)"
    return measured_peak(device, dtype), source


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name without the "torch." prefix."""
    return str(dtype).removeprefix("torch.")
