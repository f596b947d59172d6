# SPDX-License-Identifier: Apache-2.0
"""Check whether a GPU, and the package of kernels that a --*-backend flag names, can be used.

Weft runs without any of them. The packages are NVIDIA apex and Transformer Engine; each may be
missing, built for another torch, or not support a device or a dtype.
"""

import importlib
from pathlib import Path

import torch

from mpu import driver
from mpu.launch import Launch, hides_gpus, visible_gpus

OWN = {  # the value of each flag that needs no package
    "--norm-backend": "weft",
    "--attention-backend": "auto",
    "--optimizer-backend": "torch",
}
NAMES = {
    "apex": "NVIDIA apex, built with its CUDA extensions,",
    "te": "Transformer Engine",
}
FUSED_ADAM = {"apex": "apex.optimizers", "te": "transformer_engine.pytorch.optimizers"}
TE_KERNELS = "transformer_engine_torch"  # importing transformer_engine.pytorch loads it
APEX_NORM = "fused_layer_norm_cuda"
# modules that must be importable, in this order; "module:name" also needs the name in the module
NEEDS = {
    ("--norm-backend", "apex"): (APEX_NORM,),
    ("--norm-backend", "te"): ("transformer_engine.pytorch", TE_KERNELS),
    ("--attention-backend", "te"): ("transformer_engine.pytorch", TE_KERNELS),
    ("--optimizer-backend", "apex"): (f"{FUSED_ADAM['apex']}:FusedAdam", "amp_C"),
    ("--optimizer-backend", "te"): (f"{FUSED_ADAM['te']}:FusedAdam", TE_KERNELS),
}


def own_gpu(launch: Launch) -> torch.device:
    """Make this rank's GPU the current one, and return it. Raises ValueError if there is none.

    Triton launches kernels on the current GPU, wherever their tensors are (triton/runtime/jit.py),
    and torch allocates page-locked memory for that GPU. A process may see fewer GPUs than its node
    has ranks: srun may assign each its own GPU, which is then number 0.
    """
    count = torch.cuda.device_count()
    if not count:
        raise ValueError("torch sees no CUDA device: use --device cpu")
    device = torch.device("cuda", launch.local_rank % count)
    torch.cuda.set_device(device)
    return device


def unusable_gpu() -> str:
    """Return why torch cannot use a present GPU; "" if it can, or if there is none or it is hidden.

    CUDA_VISIBLE_DEVICES hides all GPUs if it is empty or -1.
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
        built = f"torch {torch.__version__} (built for ROCm {hip}) sees no device"
        return f"this machine has {here}, but {built} ({why})" if here.exists() else ""
    return driver.why_unusable(torch.__version__, cuda, why, visible)


def missing(flag: str, backend: str, device_type: str, dtype: torch.dtype) -> str:
    """Return why `flag backend` cannot be used for `dtype` on such a device, or "" if it can.

    dtype: of the kernels' computation; for --optimizer-backend, of the masters. Imports the
    package, so call it for the chosen backend only.
    """
    own = OWN[flag]
    if backend == own:
        return ""
    if device_type != "cuda":
        return f"{flag} {backend} has CUDA kernels only: use {flag} {own} on {device_type}"
    if flag == "--optimizer-backend" and dtype != torch.float32:
        return needs_fp32(backend, dtype)
    if dtype == torch.float64:
        return f"{flag} {backend} has no fp64: use {flag} {own}"
    try:
        for need in NEEDS[flag, backend]:
            module, _, name = need.partition(":")
            found = importlib.import_module(module)
            if name:
                getattr(found, name)
    except Exception as error:  # a package that was built for another torch raises anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return (
            f"{flag} {backend} needs {NAMES[backend]} which cannot be used here ({why}): "
            f"install it or use {flag} {own}"
        )
    return ""


def needs_fp32(backend: str, dtype: torch.dtype) -> str:
    """Return the error message for masters of `dtype` with a backend of the optimizer."""
    name = str(dtype).removeprefix("torch.")
    return (
        f"--optimizer-backend {backend} updates fp32 masters only, not {name}: "
        "use --optimizer-backend torch"
    )
