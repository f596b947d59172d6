# SPDX-License-Identifier: Apache-2.0
"""See which Triton kernels and which attention operators a stretch of code runs.

    KERNELS     what each row launches: a row fails where it did not launch all of its kernels
    ATTENTION   the calls of the product that attend on CUDA, with the rows that make them

A test on a CPU (tests/tools/test_gpu_check.py) finds every kernel of mpu/kernels and every call of
an attention operator in mpu/layers in these tables, and the rows that name them in a part.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = {
    "kernel-norm": (
        "norm_forward_kernel", "norm_backward_kernel", "norm_forward_long_kernel",
        "norm_backward_long_kernel", "fold_kernel",
    ),
    "kernel-rope": ("rope_kernel",),
    "kernel-swiglu": ("swiglu_forward_kernel", "swiglu_backward_kernel"),
    "kernel-loss": ("softmax_stats_kernel", "softmax_gradient_kernel"),
    "kernel-float8": ("row_scales_kernel", "encode_kernel", "rows_kernel"),
    "kernel-swiglu-rows": ("swiglu_scales_kernel", "swiglu_rows_kernel"),
    "kernel-sum": ("sum_of_parts_kernel",),
    "kernel-max-logits": ("max_logits_kernel",),
    "kernel-expert-rows": ("sum_rows_kernel", "combine_backward_kernel"),
    "kernel-grouped-wgrad": ("grouped_wgrad_kernel",),
    # between processes, and as one that plays a rank: tests/gpu/test_overlap_kernels.py
    "overlap-kernels": (
        "all_gather_matmul_kernel", "matmul_scatter_kernel", "reduce_kernel",
        "raise_flags_kernel", "wait_flags_kernel",
    ),
}  # fmt: skip
# a call in mpu/layers, and the row of gpu-check that makes it on CUDA
ATTENTION = {
    "F.scaled_dot_product_attention": "attention",
    "aten._flash_attention_forward": "attention",
    "aten._scaled_dot_product_flash_attention": "context",
    "aten._scaled_dot_product_flash_attention_backward": "context",
    "aten._scaled_dot_product_cudnn_attention": "context",
    "aten._scaled_dot_product_cudnn_attention_backward": "context",
}


@contextmanager
def launches() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Yield a list that gets (kernel, {argument: value}) of each Triton launch in the block."""
    from mpu.kernels.launch import Kernel

    found: list[tuple[Any, dict[str, Any]]] = []
    launch = Kernel.launch

    def note(kernel: Kernel, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | named))
        launch(kernel, grid, *args, **named)

    with mock.patch.object(Kernel, "launch", note):
        yield found


class Operators(TorchDispatchMode):
    """Note the operators that run in a block and whose names hold a word, backward's too."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.names = word, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if self.word in name and name not in self.names:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
