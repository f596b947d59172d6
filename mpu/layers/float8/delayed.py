# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling: a tensor's scale in float8 follows from its largest numbers in earlier steps.

    in a step     each x, w and dy is scaled by the stored byte; the byte it would need is noted
    its end       the maximum of what was noted, over micro-batches and over tp x cp x dp
                  -> the newest entry of the history -> the stored byte of the next step

So no operand waits for its own amax, and no message about scales travels but one at the end of a
step, over tp and over dp x cp (Micikevicius et al. 2022, arXiv:2209.05433, section 3.3). Numbers
above the stored scale's maximum are clamped. Numbers that are not finite stay so. In the first step
there is no history, and each tensor is scaled by the tensor at hand ("tensorwise").

Noting is a maximum, so what recomputation repeats changes nothing; what an evaluation or a
measurement notes between two steps is forgotten when the next one begins. A step whose update is
skipped leaves the history as it was.
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
    """How scales follow from the history: Megatron's flags --fp8-amax-*.

    length: steps that are stored. most_recent: the newest amax decides, else the largest.
    """

    length: int = 1
    most_recent: bool = True


class AmaxHistory(StepState):
    """The amaxes of one rank's layers, in the order of `names`: x, dy and w of each.

    history: fp32 [layers, 3, length], the newest first, 0 where nothing is; an entry is the largest
    number that the scale of the true amax holds, which has the same scale in every format.
    scale_bytes_of_step: the byte of each scale now in use, [layers, 3]. filled: of each layer,
    whether there is a history to scale by.

    like: a weight, on whose device they are.
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
        # what is only counted, without data, is a step in mid-run
        self.filled = [like.is_meta] * len(names)
        shape = len(names), len(ROLES)
        self.history = like.new_zeros((*shape, how.length), dtype=torch.float32)
        self.scale_bytes_of_step = like.new_zeros(shape, dtype=torch.uint8)
        self.noted = like.new_zeros(shape, dtype=torch.uint8)

    def begin_step(self) -> None:
        """Forget what was noted since the last step."""
        self.noted.zero_()

    @torch.no_grad()
    def end_step(self, found_inf: Tensor) -> None:
        """Let all ranks of the stage agree, and make the next step's scales; before the update.

        found_inf: 1.0 where the update is skipped, and with it this. Nothing waits for the device
        but the first step.
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
        """Go on from what was written into `history`; a layer that has none begins anew."""
        self._scale()
        self.filled = (self.history > 0).flatten(1).any(1).tolist()

    def _scale(self) -> None:
        """Make the stored bytes of the history. An amax of 0 keeps a scale of 1."""
        amax = self.history[:, :, 0] if self.how.most_recent else self.history.amax(2)
        for i, form in enumerate(self._forms):
            byte = scale_bytes(amax[:, i], form).to(torch.int32)
            byte = torch.where(amax[:, i] > 0, byte.clamp(1, NOT_FINITE - 1), 127)
            self.scale_bytes_of_step[:, i] = byte.to(torch.uint8)


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of one layer in the history."""

    amaxes: AmaxHistory
    number: int

    @property
    def filled(self) -> bool:
        """Return whether there is a history to scale by."""
        return self.amaxes.filled[self.number]

    def note(self, role: str, byte: Tensor) -> None:
        """Note the byte that a tensor at hand asks for, of any shape of one number."""
        noted = self.amaxes.noted[self.number, ROLES.index(role)]
        torch.maximum(noted, byte.view(()), out=noted)

    def scale(self, role: str, byte: Tensor) -> Tensor:
        """Return the stored byte in the shape of that of the tensor at hand, or the latter where it
        is NOT_FINITE."""
        stored = self.amaxes.scale_bytes_of_step[self.number, ROLES.index(role)]
        return torch.where(byte == NOT_FINITE, byte, stored)
