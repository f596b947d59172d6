# SPDX-License-Identifier: Apache-2.0
"""Run layouts of tests/model/twin.py by Triton's kernels, and count what was called.

In a world whose triton is the interpreter the predicates are told that a CPU tensor is on a GPU.

    fp64    Triton's norm, RoPE and SwiGLU; the loss by csrc, as its kernels know no fp64
    fp32    these, and the kernels of the loss
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.model.twin import run_layout

KERNELS = {
    "float64": {"norm_forward", "norm_backward", "fold", "rope", "swiglu_forward",
                "swiglu_backward"},
    "float32": {"norm_forward", "norm_backward", "fold", "rope", "swiglu_forward",
                "swiglu_backward", "softmax_stats", "softmax_gradient"},
}  # fmt: skip


def on_kernels(comm, some: list[dict], steps: int = 1) -> list[dict]:
    """Run cases on one rank by Triton's kernels, in the interpreter."""
    from mpu.kernels import cross_entropy, rms_norm, rope, swiglu
    from mpu.layers import cross_entropy as loss
    from mpu.layers import fused, fused_gpu, softmax_rows

    found = []
    for case in some:
        called: Counter[str] = Counter()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "fits", lambda *tensors, accumulate=None: False)
            if case.get("dtype") == "float32":
                patch.setattr(loss, "fits", lambda *tensors, accumulate=None: False)
            for module in (fused_gpu, softmax_rows):
                patch.setattr(module, "on_triton", taken)
            for module, name in (
                (rms_norm, "norm_forward"), (rms_norm, "norm_backward"), (rms_norm, "fold"),
                (rope, "rope"), (swiglu, "swiglu_forward"), (swiglu, "swiglu_backward"),
                (cross_entropy, "softmax_stats"), (cross_entropy, "softmax_gradient"),
            ):  # fmt: skip
                patch.setattr(module, name, counted(getattr(module, name), called, name))
            found.append(run_layout(comm, case, steps) | {"called": called})
    return found


def taken(*tensors: torch.Tensor, accumulate: torch.dtype | None = None) -> bool:
    """Answer `on_triton` as for tensors on a GPU; the profile of a model counts on meta."""
    if tensors[0].is_meta:
        return False
    dtype = tensors[0].dtype
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return accumulate in (None, sums) and all(t.dtype == dtype for t in tensors)


def counted(
    call: Callable[..., Any], called: Counter[str], name: str
) -> Callable[..., Any]:
    def wrapped(*args: Any, **named: Any) -> Any:
        called[name] += 1
        return call(*args, **named)

    return wrapped
