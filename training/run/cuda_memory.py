# SPDX-License-Identifier: Apache-2.0
"""Give CUDA's unused memory back, and count what is allocated and what the allocator keeps."""

import torch

from training.config import Config


def empty(config: Config, device: torch.device, level: int) -> None:
    """Empty CUDA's cache where --empty-unused-memory-level is at least `level`.

    1: before an update, and after the forwards of an evaluation. 2: after an update. Each time the
    device is waited for, and what is freed is asked for again in the next step.
    """
    if config.fault.empty_unused_memory_level >= level and device.type == "cuda":
        torch.cuda.empty_cache()


def numbers(device: torch.device) -> dict[str, float]:
    """Return the bytes in use now and those that the allocator keeps, for the log; {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        "memory_reserved_bytes": torch.cuda.memory_reserved(device),
    }
