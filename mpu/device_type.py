# SPDX-License-Identifier: Apache-2.0
"""Say which kind of device a run has, also where its tensors are only stood in for.

A recording of a step (forecast/recording.py) runs the program on meta tensors, which have shapes
and no memory. What differs between a CPU and a GPU (which verb carries a sum, in which dtype, how
many rows are taken at once) is asked here, so that a recording of a GPU's step is a GPU's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_stood_for = "cpu"  # of the process, as autograd's threads ask too


def device_type(x: Tensor | torch.device) -> str:
    """Return "cpu" or "cuda"; of a meta tensor, or the meta device, that which it stands for."""
    kind = (x.device if isinstance(x, Tensor) else x).type
    return _stood_for if kind == "meta" else kind


def on_gpu(x: Tensor | torch.device) -> bool:
    """Return whether a tensor is on a GPU, or stands for one that is."""
    return device_type(x) == "cuda"


@contextmanager
def meta_stands_for(kind: str) -> Iterator[None]:
    """Let meta tensors stand for tensors of a kind of device meanwhile: "cpu" or "cuda"."""
    global _stood_for
    before, _stood_for = _stood_for, kind
    try:
        yield
    finally:
        _stood_for = before
