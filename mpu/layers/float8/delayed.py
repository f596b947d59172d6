# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling: a tensor's float8 scale is computed from its maxima (amax) in earlier steps.

    in a step     each x, w and dy is scaled by the stored byte; the byte it would need is recorded
    its end       the maximum of the recorded bytes, over micro-batches and over tp x cp x dp
                  -> the newest entry of the history -> the stored byte of the next step

So no operand waits for its own amax, and the only communication of scales is at the end of a step,
over tp and over dp x cp (Micikevicius et al. 2022, arXiv:2209.05433, section 3.3). Values above the
maximum of the stored scale are clamped. Values that are not finite stay so. In the first step there
is no history, and each tensor is scaled by its own amax ("tensorwise").

A maximum is recorded, so recomputation changes nothing; bytes recorded by an evaluation or a
measurement between two steps are discarded when the next one begins. A step whose update is skipped
leaves the history unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpu.comm.collectives import MAX, all_reduce
from mpu.comm.transport import Label
from mpu.context import LayerContext
from mpu.gradients import StepState
from mpu.layers.float8.rows import E4M3, NOT_FINITE, Format, scale_bytes, scale_of

ROLES = ("x", "dy", "w")
AMAXES = Label("float8", "amaxes")


@dataclass(frozen=True)
class Delayed:
    """How scales are computed from the history: Megatron's flags --fp8-amax-*.

    length: number of steps stored. most_recent: use the newest amax; else the largest.
    """

    length: int = 1
    most_recent: bool = True


class AmaxHistory(StepState):
    """The amaxes of one rank's layers, in the order of `names`: x, dy and w of each.

    history: fp32 [layers, 3, length], the newest first, 0 if empty; an entry is the largest value
    that the scale of the true amax can represent, which has the same scale in every format.
    scale_bytes_of_step: the byte of each scale in use, [layers, 3]. filled: for each layer, whether
    it has a history.

    like: a weight, whose device is used.
    """

    def __init__(
        self,
        names: Sequence[str],
        how: Delayed,
        dy: Format,
        ctx: LayerContext,
        like: Tensor,
    ) -> None:
        self.names, self.how, self.ctx = names, how, ctx
        self._forms = (E4M3, dy, E4M3)
        # a dry run without data represents a step in the middle of a run
        self.filled = [like.is_meta] * len(names)
        shape = len(names), len(ROLES)
        self.history = like.new_zeros((*shape, how.length), dtype=torch.float32)
        self.scale_bytes_of_step = like.new_zeros(shape, dtype=torch.uint8)
        self.noted = like.new_zeros(shape, dtype=torch.uint8)

    def begin_step(self) -> None:
        """Discard the bytes recorded since the last step."""
        self.noted.zero_()

    @torch.no_grad()
    def end_step(self, found_inf: Tensor) -> None:
        """Reduce the amaxes over the stage and compute the next step's scales, before the update.

        found_inf: 1.0 if the update is skipped, and this with it. Only the first step waits for the
        device.
        """
        for axis in (self.ctx.tp, self.ctx.grid.dp_cp):
            if axis.size > 1:
                all_reduce(self.noted, axis, op=MAX, label=AMAXES)
        known = (self.noted > 0) & (self.noted < NOT_FINITE)
        newest = torch.where(known, scale_of(self.noted), 0.0)
        for i, form in enumerate(self._forms):
            newest[:, i] *= form.top
        later = torch.cat([newest.unsqueeze(2), self.history[:, :, :-1]], dim=2)
        self.history.copy_(torch.where(found_inf > 0, self.history, later))
        self._scale()
        if not all(self.filled) and not found_inf.item():
            self.filled = [True] * len(self.names)

    def loaded(self) -> None:
        """Resume from a loaded `history`; a layer whose history is empty starts without one."""
        self._scale()
        self.filled = (self.history > 0).flatten(1).any(1).tolist()

    def _scale(self) -> None:
        """Compute the stored bytes from the history. An amax of 0 gives a scale of 1."""
        amax = self.history[:, :, 0] if self.how.most_recent else self.history.amax(2)
        for i, form in enumerate(self._forms):
            byte = scale_bytes(amax[:, i], form).to(torch.int32)
            byte = torch.where(amax[:, i] > 0, byte.clamp(1, NOT_FINITE - 1), 127)
            self.scale_bytes_of_step[:, i] = byte.to(torch.uint8)


@dataclass(frozen=True, eq=False)
class Slot:
    """The entry of one layer in the history."""

    amaxes: AmaxHistory
    number: int

    @property
    def filled(self) -> bool:
        """Return whether the layer has a history."""
        return self.amaxes.filled[self.number]

    def note(self, role: str, byte: Tensor) -> None:
        """Record the byte that the current tensor would need; `byte` has one element."""
        noted = self.amaxes.noted[self.number, ROLES.index(role)]
        torch.maximum(noted, byte.view(()), out=noted)

    def scale(self, role: str, byte: Tensor) -> Tensor:
        """Return the stored byte in the shape of `byte`, the current tensor's own; the latter
        itself if it is NOT_FINITE."""
        stored = self.amaxes.scale_bytes_of_step[self.number, ROLES.index(role)]
        return torch.where(byte == NOT_FINITE, byte, stored)
