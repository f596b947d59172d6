# SPDX-License-Identifier: Apache-2.0
"""Choose each matmul's overlap method from a fixed map on which all ranks agree.

Under `auto` every matmul uses the method that was measured fastest for its shape
(training/run/autotune/measure.py), or that a checkpoint recorded. A shape that was not measured
uses `none` and is recorded in Auto.unmeasured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from mpu.comm.shared_memory import SharedMemoryTransport
from mpu.comm.transport import Axis
from mpu.overlap.method import NoOverlap, OverlapMethod, Replicated, Symmetric
from mpu.overlap.ring import Ring

METHODS = ("none", "ring", "symmetric")  # the methods of a shape; auto chooses among them


@dataclass(frozen=True)
class OverlapMap:
    """A run's overlap methods. mode: none, ring, symmetric or auto. choices: {matmul (see `key`):
    method} under auto. seconds: the measurements, {matmul: {method: seconds}}.
    """

    mode: str = "none"
    choices: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def method(self, axis: Axis, cut: bool) -> OverlapMethod:
        """Return the method of linear layers over an axis.

        cut: x is cut along its rows (sequence parallelism); else the method is Replicated. If ranks
        cannot access one another's memory, ring replaces symmetric.
        """
        if not cut:
            return Replicated(axis)
        if self.mode == "auto":
            return Auto(axis, self.choices)
        return method_called(self.mode, axis)


class Auto(NoOverlap):
    """Uses the method chosen for an operation and its shape, or `none`.

    unmeasured: the matmuls without a chosen method, in the order of their first use.
    """

    def __init__(self, axis: Axis, choices: Mapping[str, str]) -> None:
        super().__init__(axis)
        self.choices = choices
        self.unmeasured: dict[str, None] = {}
        self._method = cache(self._method_of)

    def of(self, op: str, x: Tensor, width: int) -> OverlapMethod:
        """Return the method chosen for the matmul; without one, record it and return `none`."""
        rows = x.shape[:-1].numel() // (1 if op == "gather" else self.axis.size)
        return self._method(op, rows, x.shape[-1], width, x.dtype).of(op, x, width)

    def _method_of(
        self, op: str, rows: int, k: int, width: int, dtype: torch.dtype
    ) -> OverlapMethod:
        matmul = key(op, rows, k, width, dtype)
        if matmul not in self.choices:
            self.unmeasured[matmul] = None
            return NoOverlap(self.axis)
        return method_called(self.choices[matmul], self.axis)


def key(op: str, rows: int, k: int, width: int, dtype: torch.dtype) -> str:
    """Return the name of a matmul with its collective, x [rows, k] and weights [width, k].

    op: `gather` or `scatter`. rows: of one rank's part.
    """
    return f"{op} {rows}x{k} -> {width} {str(dtype).removeprefix('torch.')}"


def method_called(name: str, axis: Axis) -> OverlapMethod:
    """Return the method called `name`; ring instead of symmetric if the axis shares no memory."""
    if name == "none":
        return NoOverlap(axis)
    if name == "ring" or not axis.symmetric:
        return Ring(axis)
    assert name == "symmetric", name
    if isinstance(axis.required_transport, SharedMemoryTransport):
        return Symmetric(axis)
    from mpu.overlap.cuda import KernelOverlap  # needs triton

    return KernelOverlap(axis)
