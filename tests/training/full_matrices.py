# SPDX-License-Identifier: Apache-2.0
"""An optimizer of full matrices: momentum over its Frobenius norm, which needs all of a matrix.

Momentum is sharded as every state is. It decays in the weight, as AdamW does.
"""

from dataclasses import dataclass

import torch

from mpu.optim.interface import Parts, StateKind, Updater, UpdateRule
from mpu.optim.matrix_exchange import MatrixUpdater


@dataclass(frozen=True)
class Normalised(UpdateRule):
    momentum: float = 0.9
    name = "Normalised"
    kinds = (StateKind("momentum_buffer"),)
    needs_full_matrices = True

    def updater(self, parts: Parts) -> Updater:
        return NormalisedUpdater(self, parts)


class NormalisedUpdater(MatrixUpdater):
    def prepare(self, grad, state, group):
        moved = self.rule.momentum * state["momentum_buffer"] + grad
        return moved, {"momentum_buffer": moved}

    def full_update(self, matrix, which):
        return matrix / (torch.linalg.matrix_norm(matrix) + 1e-9)

    def apply(self, weight, update, which, group):
        return weight * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
