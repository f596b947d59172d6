# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al. 2024): momentum, orthogonalised by Newton-Schulz; docs/muon.md.

    B <- lerp(B, g, 1 - m)                       on each rank's slice
    U = orthogonalise(lerp(g, B, m) or B)        on the matrix' owner; with or without Nesterov
    w <- w (1 - lr decay) - lr scale U           on each rank's slice

The order of operations is that of torch.optim.Muon, so that on one rank the bits are equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpu.optim.interface import Parts, StateKind, Updater, UpdateRule
from mpu.optim.matrix_exchange import MatrixUpdater
from mpu.optim.newton_schulz import Coefficients, coefficients_of, orthogonalise, scale_of
from mpu.optim.owners import FullMatrix, Split


@dataclass(frozen=True)
class Muon(UpdateRule):
    """Muon (Jordan et al. 2024): momentum, orthogonalised by Newton-Schulz iterations."""

    momentum: float = 0.9
    nesterov: bool = False
    # (a, b, c) of each Newton-Schulz step
    coefficients: Coefficients = coefficients_of("quintic", 5)
    # the update is multiplied by scale_of(shape, scale_mode) x extra_scale
    scale_mode: str = "spectral"
    extra_scale: float = 1.0
    split: Split = Split()  # which sections are matrices of their own
    bf16: bool = True  # iterate in bf16; else in the masters' dtype. fp64 runs always use fp64
    name = "Muon"
    kinds = (StateKind("momentum_buffer"),)
    needs_full_matrices = True

    def wire(self, master: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.bf16 and master == torch.float32 else master

    def updater(self, parts: Parts) -> Updater:
        return MuonUpdater(self, parts)

    def scale(self, which: FullMatrix) -> float:
        """Return the factor of a matrix' update, besides the learning rate."""
        return self.extra_scale * scale_of(which.rows, which.columns, self.scale_mode)


class MuonUpdater(MatrixUpdater):
    """Muon on a rank's slices, and on the matrices that it owns."""

    rule: Muon

    def prepare(
        self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        momentum = self.rule.momentum
        buffer = state["momentum_buffer"].lerp(grad, 1 - momentum)
        travels = grad.lerp(buffer, momentum) if self.rule.nesterov else buffer
        return travels, {"momentum_buffer": buffer}

    def full_update(self, matrix: Tensor, which: FullMatrix) -> Tensor:
        return orthogonalise(matrix, self.rule.coefficients)

    def apply(
        self, weight: Tensor, update: Tensor, which: FullMatrix, group: Mapping[str, Any]
    ) -> Tensor:
        lr = group["lr"]
        new = weight * (1 - lr * group["weight_decay"])
        return new.add_(update, alpha=-lr * self.rule.scale(which))
