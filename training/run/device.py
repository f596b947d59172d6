# SPDX-License-Identifier: Apache-2.0
"""Choose the device of a rank, how exact its arithmetic is, and how its process frees memory."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from mpu import driver
from mpu.accelerators import own_gpu
from mpu.launch import (
    Launch,
    cores,
    cpu_settings,
    cuda_settings,
    has_one_queue,
    launched_by,
    launches_block,
    rounding_variables,
    set_deterministic,
)
from training.settings.config import Config, UsageError

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # what mallopt accepts
ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS is 1: all streams share one hardware queue of the GPU, where a "
    "waiting all-gather blocks the kernels behind it, so --overlap-param-gather overlaps less "
    "(Megatron-LM refuses 1 for FSDP). Unset it: Weft's tp streams have high priority instead"
)


def choose_device(
    config: Config, launch: Launch, share_cores: bool, note: Callable[[str], None]
) -> torch.device:
    """Return this rank's device. share_cores: on a CPU, take only this rank's share of the cores.

    note is called with lines on environment variables that change the device's arithmetic and, on
    CUDA, on the device. Raises UsageError if ranks would share a GPU over NCCL.
    """
    lines = fp32_lines(config.run.allow_tf32)
    set_arithmetic(config.run.deterministic_mode, config.run.allow_tf32)
    kind = config.parallel.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        _check_launches(config)
        _check_count(config, launch)
        device = own_gpu(launch)
        note(f"device: {_about(device)}")
        if config.parallel.distributed_backend != "gloo" and (line := _hidden(launch)):
            note(line)
        if config.parallel.zero == 3 and config.parallel.overlap_param_gather and has_one_queue():
            note(ONE_QUEUE)
        for line in [*lines, *cuda_settings()]:
            note(line)
        return device
    for line in [*lines, *cpu_settings()]:
        note(line)
    keep_freed_memory()
    if share_cores:
        torch.set_num_threads(max(1, cores() // launch.local_world))
    return torch.device("cpu")


def _check_count(config: Config, launch: Launch) -> None:
    """Raise UsageError if ranks would share a GPU over NCCL."""
    count, here = torch.cuda.device_count(), launch.local_world
    gloo = config.parallel.distributed_backend == "gloo"
    if here > count and not gloo and launched_by() == "torchrun":
        gpus = "1 CUDA device" if count == 1 else f"{count} CUDA devices"
        raise UsageError(
            f"{here} ranks were started on this node, which has {gpus} (a MIG instance counts as "
            "one, and a process sees only one): NCCL needs one GPU per rank, so give torchrun "
            f"--nproc-per-node {count}, or let ranks share GPUs with --distributed-backend gloo"
        )


def _check_launches(config: Config) -> None:
    """Raise UsageError if CUDA_LAUNCH_BLOCKING would deadlock the stages of a pipeline.

    A stage posts a receive before it computes the message that its neighbour waits for, and on NCCL
    a receive is a kernel that runs until the message has arrived.
    """
    size = config.parallel.pipeline_model_parallel_size
    if size > 1 and config.parallel.distributed_backend != "gloo" and launches_block():
        raise UsageError(
            f"CUDA_LAUNCH_BLOCKING is set and --pipeline-model-parallel-size is {size}: each stage "
            "would block in a receive before it sends what its neighbour needs, a deadlock; unset "
            "CUDA_LAUNCH_BLOCKING, or debug with --pipeline-model-parallel-size 1"
        )


def _hidden(launch: Launch) -> str:
    """Return a line where this process does not see the GPUs of its node's other ranks.

    CUDA maps no memory of a GPU that is hidden, by cgroups or by CUDA_VISIBLE_DEVICES
    (NVIDIA/nccl#1066, open-mpi/ompi#11949).
    """
    count = torch.cuda.device_count()
    if count >= launch.local_world:
        return ""
    sees = "1 CUDA device" if count == 1 else f"{count} CUDA devices"
    return (
        f"this process sees {sees}, but its node runs {launch.local_world} ranks: if SLURM hides "
        "the other GPUs (--gpu-bind, --gpus-per-task), NCCL may use host memory instead of NVLink, "
        "and --tp-comm-overlap symmetric becomes ring; srun --gpu-bind=none shows all GPUs"
    )


def _about(device: torch.device) -> str:
    """Return the device's name, its driver and the build of torch."""
    has = torch.cuda.get_device_properties(device)
    built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    runs = f"driver {driver.version()}, " if driver.version() else ""
    capability = f"compute capability {has.major}.{has.minor}"
    return f"{device}, {has.name}, {capability}; {runs}torch {torch.__version__} for {built}"


def fp32_lines(allow_tf32: bool) -> list[str]:
    """Return a line if fp32 matmuls run in lower precision, or a setting had requested that.

    Call it before `set_arithmetic`: it also reads torch's settings, which a sitecustomize.py or the
    model's file may have changed.
    """
    if allow_tf32:
        return ["--allow-tf32: fp32 matmuls round their operands to TF32 on a GPU that supports it"]
    mkldnn: Any = torch.backends.mkldnn
    asked = rounding_variables()
    set_to = {torch.backends.cuda.matmul.fp32_precision, mkldnn.matmul.fp32_precision}
    if set_to & {"tf32", "bf16"}:
        asked.append("torch's fp32_precision")
    if not asked:
        return []
    return [
        f"{', '.join(asked)}: overridden, fp32 matmuls are computed in fp32 (--allow-tf32 allows "
        "TF32)"
    ]


def set_arithmetic(deterministic: bool, allow_tf32: bool = False) -> None:
    """Set how torch's kernels may round and reorder. Call it before CUDA starts.

    An fp32 matmul is computed in fp32, whatever the environment or other code set before
    (`mpu.launch.as_fp32` handles the variables that torch reads when it is imported). allow_tf32:
    it may round its operands to TF32, of 10 bits, on CUDA. A matmul of bf16 or fp16 adds its parts
    in fp32: torch's default lets cuBLAS add the parts of a split product in the narrow dtype.
    deterministic: use no operation whose bits change from run to run (docs/numerics.md, "On a
    GPU"). In this mode torch would also fill each new tensor before it is written
    (torch.utils.deterministic), which is switched off: it passes over the memory and changes no
    result.
    """
    backends: Any = torch.backends
    matmul, mkldnn = backends.cuda.matmul, backends.mkldnn
    # the newer names first, as torch asks the older ones whether the two agree (2.11 to 2.13)
    for each in (backends, backends.cudnn, mkldnn.conv, mkldnn.rnn):
        each.fp32_precision = "none"
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    backends.cudnn.allow_tf32 = allow_tf32
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    if deterministic:
        set_deterministic()
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks; return False if the C library has no such option.

    Otherwise every block of some megabytes is unmapped when freed, and its pages are faulted in
    again, zeroed, at the next use: thousands of page faults a step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(TRIM_THRESHOLD, 2**31 - 1)
    )
