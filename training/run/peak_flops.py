# SPDX-License-Identifier: Apache-2.0
"""The peak that model FLOP/s are compared with: from a GPU's data sheet, or a measured matmul.

Model FLOP/s utilization (MFU) = model FLOP/s / (peak of one rank * ranks).
"""

import time

import torch

from mpu.layers.linear import Recipe

# Dense bf16 tensor-core TFLOP/s of one device, without sparsity, from NVIDIA's data sheets. A row
# matches when all its words stand in the device's name; the first row that matches counts. Where
# there is a device file of a GPU (tools/rehearsal/devices), its peak is the same: a test compares.
DENSE_BF16_TFLOPS = (
    (("GB300",), 2500.0),
    (("B300",), 2500.0),
    (("GB200",), 2500.0),
    (("B200",), 2250.0),
    (("GH200",), 989.4),
    (("H200", "NVL"), 836.0),
    (("H200",), 989.4),
    (("H100", "PCIe"), 756.0),
    (("H100", "NVL"), 835.0),
    (("H100",), 989.4),
    (("H800",), 989.4),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("L40S",), 362.0),
    (("L4",), 121.0),
    (("A40",), 150.0),
)


def table_peak(name: str) -> float | None:
    """Return a GPU's dense bf16 FLOP/s by its name as the driver gives it, or None if unknown.

    An instance of MIG has the GPU's name and "MIG 1g.10gb", and a share of its FLOP/s: unknown.
    """
    words = set(name.replace("-", " ").split())
    if "MIG" in words:
        return None
    for wanted, tflops in DENSE_BF16_TFLOPS:
        if words.issuperset(wanted):
            return tflops * 1e12
    return None


def measured_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Return the best FLOP/s of the layers' own product of square matrices, with this process'
    threads.
    """
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
        peak = table_peak(name)
        if peak is not None and dtype == torch.bfloat16:
            return peak, f"the dense bf16 peak of {name} from its data sheet"
        return measured_peak(device, dtype), f"measured here on {name} with a {short(dtype)} matmul"
    threads = torch.get_num_threads()
    source = f"measured here with a {short(dtype)} matmul, {threads} thread(s)"
    return measured_peak(device, dtype), source


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name without the torch in front."""
    return str(dtype).removeprefix("torch.")
