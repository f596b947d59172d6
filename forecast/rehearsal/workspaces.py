# SPDX-License-Identifier: Apache-2.0
"""Workspaces of operators, computed as in torch's source.

They come from torch's allocator, so torch.cuda.max_memory_allocated includes them. Memory of
unknown size, or outside of that allocator, is only named: `not_counted`.
"""

from collections.abc import Sequence
from math import prod

from forecast.dry_run import CUBLAS_WORKSPACE
from forecast.rehearsal.events import Event, Launch, Transfer
from forecast.rehearsal.roofline import MATMULS, short_name

OF_OPERATORS, OF_MATMULS = "workspaces of operators", "workspaces of cuBLAS"
# bytes for each handle and stream, by major compute capability; other devices have OTHER: pytorch
# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize
CUBLAS, OTHER = dict.fromkeys((9, 10), CUBLAS_WORKSPACE), 4096 * 1024 * 2 + 16 * 1024 * 8
FLASH_BACKWARD = ("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward")
ROWS, CHANNELS = 128, 32  # flash's backward rounds queries and head size up to multiples of these
AHEAD = ("forward", "")  # phases of the main thread; autograd's thread has its own handle


def of_launch(launch: Launch) -> int:
    """Return the bytes of a launch's workspace, which it frees at its end.

    The backward of FlashAttention 2 has dq in fp32, one fp32 number per row, and, if heads share
    keys, dk and dv of every query head (pytorch
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd and mha_varlen_bwd).
    """
    if short_name(launch) not in FLASH_BACKWARD:
        return 0
    _, q, k = launch.shapes[:3]
    scaled = short_name(launch) == FLASH_BACKWARD[0]
    s, heads = (q[-2], q[-3]) if scaled else (q[-3], q[-2])  # [b, a, s, d], else [(b,) s, a, d]
    keys, groups = (k[-2], k[-3]) if scaled else (k[-3], k[-2])
    d, batch = q[-1], prod(q[:-3])
    rows = batch * heads * _up(s, ROWS)
    expanded = 2 * batch * keys * heads * d * 2 if heads != groups else 0
    return 4 * rows * (_up(d, CHANNELS) + 1) + expanded


def of_matmuls(events: Sequence[Event], major: int) -> int:
    """Return the bytes of cuBLAS's workspaces: torch keeps one for each handle and stream.

    major: of the compute capability. The main thread and autograd's have a handle each.
    """
    pairs = {
        (event.where.phase in AHEAD, event.stream)
        for event in events
        if type(event) is Launch and short_name(event) in MATMULS
    }
    return len(pairs) * CUBLAS.get(major, OTHER)


def not_counted(events: Sequence[Event]) -> list[str]:
    """Return descriptions of the memory that a rank's peak does not include."""
    names = {event.communicator for event in events if type(event) is Transfer}
    found = ["CUDA's context and the code of kernels (more with CUDA_MODULE_LOADING=EAGER)"]
    if names:
        found.append(f"NCCL's buffers of {len(names)} communicators, outside of torch's allocator")
    if any(type(e) is Launch and "cudnn_attention_backward" in e.op for e in events):
        found.append("the workspace of cuDNN's attention")
    return [*found, "fragmentation"]


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
