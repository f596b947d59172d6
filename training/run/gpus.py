# SPDX-License-Identifier: Apache-2.0
"""GPU data sheets: memory, peak FLOP/s and links, one row for each GPU.

The log's MFU uses the peak (training/run/peak_flops.py). The dry run, the rehearsal and the planner
use the whole row for a GPU without a device file of its own (forecast/device_file.py).
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """A GPU. Peaks are dense, without sparsity, accumulated in fp32; 0: not supported."""

    name: str
    driver: str  # words in the driver's name of the GPU; longer rows above match first
    like: str  # device file whose fractions of the peaks are assumed
    capability: tuple[int, int]
    memory: float
    bandwidth: float
    bf16: float
    float8: float
    tf32: float
    fp32: float
    sms: int  # streaming multiprocessors
    l2: float  # bytes of the L2 cache
    host: float  # bytes/s to its host, one direction
    # bytes/s to the other `link_gpus` of the node, one direction; over PCIe without NVLink
    link: float
    link_gpus: int
    source: str  # the document


# name, driver, like, compute capability, memory in GB, memory's GB/s, TFLOP/s in bf16, float8, tf32
# and fp32, SMs, L2 in MB, GB/s to the host, GB/s to other GPUs and how many there are
ROWS: tuple[tuple[Any, ...], ...] = (
    ("gb300", "GB300", "b200", (10, 3), 288, 8000, 2500, 5000, 1250, 80, 160, 126, 450, 900, 72,
     "NVIDIA GB300 NVL72 datasheet; SMs and cache: assumed"),
    ("b300", "B300", "b200", (10, 3), 270, 7700, 2250, 4500, 1125, 80, 148, 126, 64, 900, 8,
     "NVIDIA HGX B300 datasheet; SMs and cache: assumed"),
    ("gb200", "GB200", "b200", (10, 0), 186, 8000, 2500, 5000, 1250, 80, 152, 126, 450, 900, 72,
     "NVIDIA GB200 NVL72 datasheet; SMs and cache: assumed"),
    ("b200", "B200", "b200", (10, 0), 180, 8000, 2250, 4500, 1125, 80, 148, 126, 64, 900, 8,
     "NVIDIA HGX B200 datasheet"),
    ("gh200", "GH200", "h100", (9, 0), 96, 4000, 989.4, 1978.9, 494.7, 66.9, 132, 52, 450, 450, 8,
     "NVIDIA GH200 datasheet, 96 GB"),
    ("h200-nvl", "H200 NVL", "h200", (9, 0), 141, 4800, 836, 1671, 418, 60, 132, 52, 64, 64, 8,
     "NVIDIA H200 NVL datasheet, without NVLink bridges"),
    ("h200", "H200", "h200", (9, 0), 141, 4800, 989.4, 1978.9, 494.7, 66.9, 132, 52, 64, 450, 8,
     "NVIDIA H200 SXM datasheet"),
    ("h100-pcie", "H100 PCIe", "h100", (9, 0), 80, 2000, 756, 1513, 378, 51, 114, 52, 64, 64, 8,
     "NVIDIA H100 PCIe datasheet, without NVLink bridges"),
    ("h100-nvl", "H100 NVL", "h100", (9, 0), 94, 3900, 835, 1671, 417, 60, 132, 52, 64, 64, 8,
     "NVIDIA H100 NVL datasheet, without NVLink bridges"),
    ("h100", "H100", "h100", (9, 0), 80, 3350, 989.4, 1978.9, 494.7, 66.9, 132, 52, 64, 450, 8,
     "NVIDIA H100 SXM datasheet"),
    ("h800", "H800", "h100", (9, 0), 80, 3350, 989.4, 1978.9, 494.7, 66.9, 132, 52, 64, 200, 8,
     "NVIDIA H800 SXM datasheet"),
    ("h20", "H20", "h100", (9, 0), 96, 4000, 148, 296, 74, 44, 78, 60, 64, 450, 8,
     "NVIDIA H20 datasheet"),
    ("a100-40-pcie", "A100 PCIE 40GB", "a100", (8, 0),
     40, 1555, 312, 0, 156, 19.5, 108, 40, 32, 32, 8,
     "NVIDIA A100 40 GB PCIe datasheet, without NVLink bridges"),
    ("a100-40", "A100 40GB", "a100", (8, 0), 40, 1555, 312, 0, 156, 19.5, 108, 40, 32, 300, 8,
     "NVIDIA A100 40 GB SXM datasheet"),
    ("a100-pcie", "A100 PCIe 80GB", "a100", (8, 0),
     80, 1935, 312, 0, 156, 19.5, 108, 40, 32, 32, 8,
     "NVIDIA A100 80 GB PCIe datasheet, without NVLink bridges"),
    ("a100", "A100", "a100", (8, 0), 80, 2039, 312, 0, 156, 19.5, 108, 40, 32, 300, 8,
     "NVIDIA A100 80 GB SXM datasheet"),
    ("a800", "A800", "a100", (8, 0), 80, 2039, 312, 0, 156, 19.5, 108, 40, 32, 200, 8,
     "NVIDIA A800 80 GB SXM datasheet"),
    ("l40s", "L40S", "a100", (8, 9), 48, 864, 362, 733, 183, 91.6, 142, 96, 32, 32, 8,
     "NVIDIA L40S datasheet"),
    ("l40", "L40", "a100", (8, 9), 48, 864, 181, 362, 90.5, 90.5, 142, 96, 32, 32, 8,
     "NVIDIA L40 datasheet"),
    ("l4", "L4", "a100", (8, 9), 24, 300, 121, 242, 60, 30.3, 58, 48, 32, 32, 8,
     "NVIDIA L4 datasheet"),
    ("a40", "A40", "a100", (8, 6), 48, 696, 149.7, 0, 74.8, 37.4, 84, 6, 32, 32, 8,
     "NVIDIA A40 datasheet"),
    ("a10", "A10", "a100", (8, 6), 24, 600, 125, 0, 62.5, 31.2, 72, 6, 32, 32, 8,
     "NVIDIA A10 datasheet"),
    ("a10g", "A10G", "a100", (8, 6), 24, 600, 70, 0, 35, 35, 80, 6, 32, 32, 8,
     "NVIDIA A10G as AWS EC2 G5 states it; SMs: assumed"),
    ("rtx-a6000", "RTX A6000", "a100", (8, 6), 48, 768, 154.8, 0, 77.4, 38.7, 84, 6, 32, 32, 8,
     "NVIDIA RTX A6000 datasheet"),
    ("rtx-6000-ada", "RTX 6000 Ada", "a100", (8, 9),
     48, 960, 364.2, 728.5, 182.1, 91.1, 142, 96, 32, 32, 8,
     "NVIDIA RTX 6000 Ada datasheet"),
    ("rtx-5090", "RTX 5090", "a100", (12, 0),
     32, 1792, 209.5, 419, 104.8, 104.8, 170, 96, 64, 64, 8,
     "NVIDIA RTX Blackwell architecture paper, sums in fp32"),
    ("rtx-4090", "RTX 4090", "a100", (8, 9),
     24, 1008, 165.2, 330.3, 82.6, 82.6, 128, 72, 32, 32, 8,
     "NVIDIA Ada architecture paper, sums in fp32"),
    ("rtx-3090", "RTX 3090", "a100", (8, 6), 24, 936, 71, 0, 35.6, 35.6, 82, 6, 32, 32, 8,
     "NVIDIA Ampere GA102 architecture paper, sums in fp32"),
)  # fmt: skip
GB, TFLOPS = 1e9, 1e12
UNITS = {"memory": GB, "bandwidth": GB, "bf16": TFLOPS, "float8": TFLOPS, "tf32": TFLOPS,
         "fp32": TFLOPS, "l2": 1e6, "host": GB, "link": GB}  # fmt: skip
OTHERS = {  # names of GPUs that no run of Weft can use, and why
    r"(amd|mi)-?\d+\w*|radeon.*": "its kernels and communicators are not built for AMD's ROCm",
    r"(tesla-)?(v100|p100|t4)|gtx-\d+|rtx-20\d\d": "it has no bfloat16",
}


OTHER_CHIPS = {"MIG", "Laptop", "Mobile", "Q", "D", "Ti", "SUPER"}  # words of names of other chips


class UnknownGpu(ValueError):
    """A name that matches no GPU in ROWS: the message lists the known names."""


def gpu_of(row: Mapping[str, Any]) -> Gpu:
    """Return the GPU of a row in the units of ROWS."""
    return Gpu(**{key: value * UNITS.get(key, 1) for key, value in row.items()})


GPUS = tuple(gpu_of(dict(zip(Gpu._fields, row, strict=True))) for row in ROWS)


def named(name: str) -> Gpu:
    """Return a GPU by its name here: "l40s", "RTX 4090", "NVIDIA A100-40". Raises UnknownGpu."""
    short = re.sub(r"[\s_]+", "-", name.strip().lower())
    short = re.sub(r"^(nvidia-)?(geforce-)?", "", short)
    for gpu in GPUS:
        if short in (gpu.name, gpu.name.removeprefix("rtx-"), f"{gpu.name}gb", f"{gpu.name}-gb"):
            return gpu
    known = ", ".join(sorted(gpu.name for gpu in GPUS))
    for pattern, why in OTHERS.items():
        if re.fullmatch(pattern, short):
            raise UnknownGpu(f"{name}: {why}; GPUs known by name are {known}")
    raise UnknownGpu(f"{name} is no GPU known by name; these are: {known}")


def of_driver(name: str) -> Gpu | None:
    """Return a GPU by its name as the driver gives it, or None if it is unknown.

    A MIG instance, whose name is the GPU's and "MIG 1g.10gb", has a fraction of the GPU's
    capability, and "NVIDIA GeForce RTX 4090 Laptop GPU" is another chip than the RTX 4090: they
    count as unknown.
    """
    words = set(re.split(r"[-\s]+", name))
    if words & OTHER_CHIPS:
        return None
    return next((gpu for gpu in GPUS if words.issuperset(gpu.driver.split())), None)
