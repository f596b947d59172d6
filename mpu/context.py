# SPDX-License-Identifier: Apache-2.0
"""LayerContext: the one frozen object a layer is given. There is no other way to learn of ranks or
devices.
"""

from dataclasses import dataclass, field

import torch

from mpu.grid import Axis, Grid
from mpu.param import GradientSink, WeightGradientQueue


@dataclass
class OverlapPlan:
    """Which path of mpu/comm/overlap.py a matmul takes: one for all, or, where mode is `auto`, the
    one chosen for its shape.

    seconds: what each path took, where that was measured. told: how many of the choices have been
    told to the user, in their order.
    """

    mode: str = "none"
    choices: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    told: int = 0


@dataclass(frozen=True)
class LayerContext:
    """What a layer may know of the world: axes, sequence parallelism, dtype, device, and where
    gradients go.

    overlap: how the linear layers' parts travel under sequence parallelism.
    dtype: of parameters and activations. accumulate: of gradients, norms, RoPE tables, softmax and
    loss (fp32, or fp64 for proofs). sequence_parallel cuts activations between the tensor-parallel
    regions along s.
    """

    grid: Grid = field(default_factory=Grid)
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    sink: GradientSink = field(default_factory=GradientSink)
    queue: WeightGradientQueue = field(default_factory=WeightGradientQueue)
    overlap: OverlapPlan = field(default_factory=OverlapPlan)

    @property
    def tp(self) -> Axis:
        """The tensor-parallel axis."""
        return self.grid.tp

    @property
    def sp(self) -> bool:
        """True where sequence parallelism has an effect."""
        return self.sequence_parallel and self.grid.tp.size > 1

    @property
    def replicated_over(self) -> tuple[Axis, ...]:
        """Axes over which a replicated weight that sees only a shard of s has partial gradients."""
        return (self.grid.tp,) if self.sp else ()
