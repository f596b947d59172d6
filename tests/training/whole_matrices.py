# SPDX-License-Identifier: Apache-2.0
"""An optimizer of whole matrices: momentum over its Frobenius norm, which needs all of a matrix.

Momentum is sharded as every state is. A collective makes each matrix whole, and the rank takes its
slice of the result back. It decays in the weight, as AdamW does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpu.comm.collectives import sum_in_order
from mpu.optim.interface import Matrix, Parts, SegmentUpdater, StateKind, Updater, UpdateRule


@dataclass(frozen=True)
class Normalised(UpdateRule):
    momentum: float = 0.9
    name = "Normalised"
    kinds = (StateKind("momentum_buffer"),)
    whole_matrices = True
    exchanges = (("all_reduce", 4),)

    def updater(self, parts: Parts) -> Updater:
        return NormalisedUpdater(self, parts)


class NormalisedUpdater(SegmentUpdater):
    def __init__(self, rule: Normalised, parts: Parts) -> None:
        super().__init__(rule, parts)
        self.matrices = parts.matrices
        self.group_of = {group["name"]: group for group in self.groups}
        self.seen: list[str] = []  # matrices of the last step

    @torch.no_grad()
    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        self._steps += 1 - found_inf.double()
        self.seen = [matrix.name for matrix in self.matrices]
        for matrix in self.matrices:
            self._update(matrix, factor, found_inf == 1)

    def _update(self, matrix: Matrix, factor: Tensor, skip: Tensor) -> None:
        mine, group = matrix.segment, self.group_of[matrix.group]
        rank = matrix.axis.rank if matrix.axis else 0
        own = slice(matrix.cuts[rank], matrix.cuts[rank + 1])
        whole = torch.zeros(matrix.param.numel(), dtype=factor.dtype)
        if mine is not None:
            buffer = self._state[mine]["momentum_buffer"]
            moved = self.rule.momentum * buffer + mine.grad * factor
            buffer.copy_(torch.where(skip, buffer, moved))
            whole[own] = buffer.to(whole)
        if matrix.axis:
            whole = sum_in_order(whole, matrix.axis)
        assert bool(skip) or torch.count_nonzero(whole), matrix.name
        whole /= torch.linalg.matrix_norm(whole.view(matrix.param.shape)) + 1e-9
        if mine is not None:
            decay, lr = group["weight_decay"], group["lr"]
            new = mine * (1 - lr * decay) - lr * whole[own].to(mine)
            mine.copy_(torch.where(skip, mine, new))
