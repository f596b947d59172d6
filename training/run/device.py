# SPDX-License-Identifier: Apache-2.0
"""Choose the device of a rank."""

import os

import torch

from mpu.launch import Launch
from training.config import Config, UsageError
from training.run.malloc import keep_freed_memory


def choose_device(config: Config, launch: Launch, share_cores: bool) -> torch.device:
    """Return this rank's device. share_cores: on a CPU, take only this rank's share of the cores.

    Raises UsageError for a CUDA device where torch sees none.
    """
    kind = config.parallel.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    keep_freed_memory()
    if share_cores:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.local_world))
    return torch.device("cpu")
