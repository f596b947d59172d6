# SPDX-License-Identifier: Apache-2.0
"""The kernels between the matmuls on meta tensors: they make their results and nothing beside.

So do csrc/ on a CPU and mpu/kernels on a GPU, which take every dtype that a run can have. Torch's
operations, which stand in for them where neither is there, need more memory for a moment.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpu.gradients import GradientSink
from mpu.layers import fused_gpu, softmax_rows


def norm_forward(
    x: Tensor, branch: Tensor | None, w: Tensor, eps: float, kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total = x if branch is None else torch.empty_like(x)
    return torch.empty_like(x), total, x.new_empty((*x.shape[:-1], 1), dtype=kind)


def norm_backward(
    x: Tensor, w: Tensor, r: Tensor, dy: Tensor, more: Tensor | None, sink: GradientSink,
    weight: nn.Parameter,
) -> Tensor:  # fmt: skip
    sink.add(weight, torch.empty_like(weight, dtype=r.dtype))
    return torch.empty_like(x)


def rope(x: Tensor, sizes: Sequence[int], cos: Tensor, sin: Tensor, own: bool) -> Tensor:
    return x.data if own else torch.empty_like(x)


def rope_backward(grads: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = grads
    s, b, _, d = q.shape
    return q.new_empty((s, b, q.shape[2] + k.shape[2] + v.shape[2], d))


def swiglu(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


def nothing(*given: Any) -> None:
    """Write to a tensor that is given."""


KERNELS = [
    *((fused_gpu, each.__name__, each) for each in (norm_forward, norm_backward, rope,
                                                    rope_backward, swiglu, swiglu_backward)),
    (softmax_rows, "stats", nothing), (softmax_rows, "gradient", nothing),
]  # fmt: skip


@contextmanager
def meta_kernels() -> Iterator[None]:
    """Let mpu/layers call these kernels meanwhile, where csrc/ does not take a tensor."""
    before = [(module, name, getattr(module, name)) for module, name, _ in KERNELS]
    try:
        for each in KERNELS:
            setattr(*each)
        yield
    finally:
        for each in before:
            setattr(*each)
