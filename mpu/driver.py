# SPDX-License-Identifier: Apache-2.0
"""Find an NVIDIA GPU's driver without torch, and explain why a program cannot use the GPU.

It only needs the standard library: tools/setup_env.py uses it before torch is installed.
"""

import os
import re
from pathlib import Path

ROOT = Path("/")
# The oldest driver for each major version of CUDA (docs.nvidia.com/deploy/cuda-compatibility,
# "Minor version compatibility")
LEAST = {13: 580, 12: 525}
OLDER = "https://download.pytorch.org/whl/cu126"  # wheels of torch for CUDA 12


def version() -> str:
    """Return the version of the kernel's NVIDIA driver, or "" if none is loaded."""
    for name, pattern in (
        ("proc/driver/nvidia/version", r"NVRM version:.*?\s(\d+\.\d[\d.]*)"),
        ("sys/module/nvidia/version", r"^(\d+\.\d[\d.]*)"),
    ):
        try:
            found = re.search(pattern, (ROOT / name).read_text())
        except OSError:
            continue
        if found:
            return found[1]
    return ""


def device_files() -> "list[Path]":
    """Return the device files of NVIDIA GPUs, /dev/nvidia0 and so on."""
    files = (ROOT / "dev").glob("nvidia[0-9]*")
    return sorted(file for file in files if file.name[len("nvidia") :].isdigit())


def found() -> str:
    """Return evidence of an NVIDIA GPU on this machine, or "" if there is none.

    A container sees the host's driver in /proc even if it was given no GPU.
    """
    if number := version():
        return f"NVIDIA driver {number}"
    if files := device_files():
        return str(files[0])
    if (ROOT / "dev/dxg").exists() and (ROOT / "usr/lib/wsl/lib/libcuda.so.1").exists():
        return "an NVIDIA driver of Windows (/usr/lib/wsl/lib/libcuda.so.1)"
    return ""


def too_old(cuda: str) -> str:
    """Return advice if the driver is too old for a CUDA version such as "13.0", or ""."""
    least = LEAST.get(int(cuda.partition(".")[0] or 0), 0)
    number = version()
    if not number or int(number.partition(".")[0]) >= least:
        return ""
    text = f"CUDA {cuda} needs driver {least} or newer: update the driver"
    major = int(number.partition(".")[0])
    return text + (f", or install torch for CUDA 12 ({OLDER})" if major >= LEAST[12] else "")


def closed() -> str:
    """Return why no GPU's device file can be opened, or "" if one can."""
    files, first = device_files(), ""
    if not files and version():
        return (
            "there is no /dev/nvidia0: start the container with its GPUs (docker run --gpus all)"
        )
    for file in [*files, *(ROOT / "dev").glob("nvidiactl")]:
        try:
            os.close(os.open(file, os.O_RDWR))
        except OSError as error:
            first = first or f"{file} cannot be opened: {error.strerror}"
    return first


def why_unusable(torch: str, cuda: "str | None", message: str, visible: "str | None") -> str:
    """Return a sentence on why torch sees no CUDA device despite an NVIDIA GPU; "" without a GPU.

    torch: its version. cuda: the version it is built for, None for a CPU build. message: torch's
    error message. visible: CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    here, number = found(), version()
    if not here:
        return ""
    if cuda is None:
        how = "install a torch that is built for CUDA"
        if number and int(number.partition(".")[0]) < LEAST[13]:
            how += f" 12 ({OLDER}), as CUDA 13 needs driver {LEAST[13]} or newer"
        return f"this machine has {here}, but torch {torch} is built without CUDA: {how}"
    how = too_old(cuda) or closed()
    if not how and visible is not None:
        how = f"CUDA_VISIBLE_DEVICES is {visible!r}, which may name GPUs not in this machine"
    how = how or "a GPU in MIG mode needs an instance (nvidia-smi -L lists them)"
    detail = f" ({message})" if message else ""
    return (
        f"this machine has {here}, but torch {torch} (built for CUDA {cuda}) sees no CUDA "
        f"device{detail}: {how}"
    )
