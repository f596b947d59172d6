# SPDX-License-Identifier: Apache-2.0
"""SGD with momentum, as a user would add it: this file and a line of update_rules.RULES.

It updates as torch.optim.SGD does, with the decay in the gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpu.optim.interface import Parts, SegmentUpdater, StateKind, Updater, UpdateRule


@dataclass(frozen=True)
class Momentum(UpdateRule):
    """buf = momentum buf + (grad + decay w); w -= lr buf."""

    momentum: float = 0.9
    name = "SGD"
    kinds = (StateKind("momentum_buffer"),)

    def updater(self, parts: Parts) -> Updater:
        return MomentumUpdater(self, parts)


class MomentumUpdater(SegmentUpdater):
    def update(
        self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        grad = grad + group["weight_decay"] * weight
        moved = self.rule.momentum * state["momentum_buffer"] + grad
        return weight - group["lr"] * moved, {"momentum_buffer": moved}
