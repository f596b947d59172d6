# SPDX-License-Identifier: Apache-2.0
"""This rank's GPU, and why torch cannot use one that is here."""

from pathlib import Path

import torch

from mpu import driver
from mpu.launch import Launch, hides_gpus, visible_gpus


def own_gpu(launch: Launch) -> torch.device:
    """Make this rank's GPU the current one, and return it. Raises ValueError where there is none.

    Triton launches a kernel on the current GPU, whatever its tensors are on
    (triton/runtime/jit.py), and torch's page-locked memory is of that one. A process may see fewer
    GPUs than its node has ranks: srun may give each a GPU of its own, which then is number 0.
    """
    count = torch.cuda.device_count()
    if not count:
        raise ValueError("there is no CUDA device here: use --device cpu")
    device = torch.device("cuda", launch.local_rank % count)
    torch.cuda.set_device(device)
    return device


def unusable_gpu() -> str:
    """Return why torch cannot use a GPU that is here, or "": it can, none is, or all are hidden.

    CUDA_VISIBLE_DEVICES hides them if it is empty or -1.
    """
    visible = visible_gpus()
    if torch.cuda.is_available() or hides_gpus(visible):
        return ""
    cuda, hip, why = torch.version.cuda, torch.version.hip, ""
    if cuda or hip:
        try:
            torch.cuda.init()
        except Exception as error:  # a driver may fail in any way
            why = str(error).partition("\n")[0].partition(". ")[0]
    if hip:
        here = Path("/dev/kfd")
        built = f"torch {torch.__version__} is built for ROCm {hip} and sees no device"
        return f"{here} is here, {built} ({why})" if here.exists() else ""
    return driver.why_unusable(torch.__version__, cuda, why, visible)
