# SPDX-License-Identifier: Apache-2.0
"""Add an auxiliary loss to the training loss from inside a block, with any schedule.

    h = ctx.auxiliary_loss(h, 0.01 * h.square().mean(-1).sum())

    forward    h passes through unchanged; the loss joins its autograd graph
    backward   the loss gets the gradient 1 / (tokens of the global batch), so it is a mean over all
               of them; its value is added to this rank's sum

A pipeline stage sends only hidden states, and its backward starts from their gradient. So the loss
is attached to the hidden states, as in Megatron's MoEAuxLossAutoScaler. Every backward runs once
for each micro-batch, even if blocks are recomputed, so values are recorded there. A pass without
backward (evaluation) records none, unless `in_forward` is set.

If a mask leaves c of the n tokens of the global batch in the main loss, one factor n / c corrects
all gradients after backward, and all sums of losses are divided by c. Blocks do not have the mask,
so their losses cover all tokens: they are multiplied by c / n before.
"""

from typing import Any

import torch
from torch import Tensor

from mpu.comm.collectives import sum_in_order
from mpu.comm.transport import Axis, Label

LABEL = Label("auxiliary_loss", "loss sum")
COUNT = Label("token count", "loss sum")


class AuxiliaryLosses:
    """A run's auxiliary losses: the scale of their gradients, and the sum of their values.

    share: the fraction of a step's tokens that are not masked, a scalar in fp64; None: no mask.
    mean: of the last step, on every rank; None before the first. in_forward: values are recorded in
    forward, for a pass without backward.
    """

    def __init__(self) -> None:
        self.tokens = 1
        self.share: Tensor | None = None
        self.sums: dict[tuple[Axis, ...], Tensor] = {}  # by the axes over which values are partial
        self.mean: Tensor | None = None
        self.in_forward = False

    def mask(self, counted: int, tokens: int, axis: Axis, device: torch.device) -> None:
        """Set, before a step's backward, the number of this rank's tokens in the main loss.

        tokens: of the global batch, over the ranks of `axis`. Collective over `axis`.
        """
        rows = torch.full((1,), counted, dtype=torch.float64, device=device)  # no copy from host
        self.share = sum_in_order(rows, axis, COUNT)[0].clamp(min=1) / tokens

    def begin(self, tokens: int) -> None:
        """Begin a step, whose gradients are divided by `tokens`."""
        self.tokens, self.sums = tokens, {}

    def add(self, loss: Tensor, axes: tuple[Axis, ...]) -> None:
        """Add the value of a loss of one micro-batch over the tokens that are not masked."""
        value = loss.detach().double()
        self.sums[axes] = self.sums[axes] + value if axes in self.sums else value

    def add_of_all(self, loss: Tensor, axes: tuple[Axis, ...]) -> None:
        """Add the value of a loss of one micro-batch over all its tokens."""
        self.add(loss if self.share is None else loss.detach().double() * self.share, axes)

    def take(self) -> Tensor | float:
        """Return the fp64 sum of this rank's values since `begin`, complete over its tp ranks."""
        sums, self.sums = self.sums, {}
        total: Tensor | float = 0.0
        for axes, value in sums.items():
            for axis in axes:
                value = sum_in_order(value[None], axis, LABEL)[0]
            total = total + value
        return total


class AuxiliaryLoss(torch.autograd.Function):
    """Return x; in backward return the gradient of `loss` and record its value (not in forward,
    which recomputation runs twice).
    """

    @staticmethod
    def forward(
        saved_ctx: Any, x: Tensor, loss: Tensor, losses: AuxiliaryLosses, axes: tuple[Axis, ...]
    ) -> Tensor:
        saved_ctx.losses, saved_ctx.axes = losses, axes
        saved_ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(saved_ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (loss,), losses = saved_ctx.saved_tensors, saved_ctx.losses
        losses.add_of_all(loss, saved_ctx.axes)
        if losses.share is None:
            return dx, torch.full_like(loss, 1 / losses.tokens), None, None
        return dx, (losses.share / losses.tokens).to(loss.dtype), None, None
