# SPDX-License-Identifier: Apache-2.0
"""Counts of tokens per expert, over the global batch, and the router bias computed from them.

    in a step     backward records, once for each micro-batch, how many of this rank's tokens chose
                  each expert of a layer
    its end       the counts are summed over tp x cp x dp: integers, so exact in any order
                  -> bias_i += rate x sign(mean of the counts - count_i)
                  -> the f_i of the next step's global-batch loss; if a bias or groups affect the
                     choice, this loss has its own counts, of each token's k best scores

The bias is added to the scores only to choose experts, so it has no gradient (Wang et al. 2024,
Auxiliary-loss-free load balancing; DeepSeek-V3 technical report, section 2.1.2). An evaluation has
no backward, and a recomputed forward causes no second one, so neither is counted. Counts recorded
by a measurement between two steps are discarded when the next step begins. A step whose update is
skipped leaves bias and counts unchanged. Nothing waits for the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpu.comm.collectives import all_reduce_in_order
from mpu.comm.transport import Label
from mpu.context import LayerContext
from mpu.gradients import StepState
from mpu.torch_private import each

LABEL = Label("experts", "counts")
MORE = 2  # values besides the counts: the dropped pairs and the sum of the router's losses


class ExpertLoad(nn.Module):
    """The counts of one router, and its bias, if it has one.

    before: tokens of each expert in the last step, over the global batch, as that loss counts them:
    [E], integers in fp64; 0 before the first step. noted: the values of this rank in this step so
    far [E + MORE], followed, with counts_best, by the counts of `best` [E]. of: the router's
    weight, whose name identifies `before` in checkpoints. e_score_correction_bias: the bias [E], in
    the accumulation dtype; a buffer, saved under Hugging Face's name. best: `before` has its own
    counts, which are passed to `note`.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        experts: int,
        of: nn.Parameter,
        *,
        ctx: LayerContext,
        bias: bool = False,
        best: bool = False,
    ) -> None:
        super().__init__()
        made = torch.zeros(experts, dtype=ctx.accumulate, device=ctx.device) if bias else None
        self.register_buffer("e_score_correction_bias", made)
        self.of = (of,)  # no parameter of this module
        self.before = torch.zeros(experts, dtype=torch.float64, device=ctx.device)
        self.counts_best, size = best, experts * (1 + best) + MORE
        self.noted = torch.zeros(size, dtype=torch.float64, device=ctx.device)
        loads = ctx.sink.state_of(ExpertLoads)
        if loads is None:
            loads = ExpertLoads(ctx)
            ctx.sink.step_states.append(loads)
        loads.add(self)

    def note(
        self, y: Tensor, counts: Tensor, losses: Tensor | None, best: Tensor | None = None
    ) -> Tensor:
        """Return y; in its backward record the counts [E] (with the dropped pairs [E + 1]), the sum
        of the losses over this rank's tokens, and with counts_best how many of these tokens have
        each expert among their k best scores [E].
        """
        assert (best is not None) == self.counts_best
        losses = None if losses is None else losses.detach()
        if torch.is_grad_enabled() and not y.requires_grad:  # everything is frozen: no backward
            self.count(counts, losses, best)
        noted: Tensor = _Note.apply(y, self, counts, losses, best)
        return noted

    def count(self, counts: Tensor, losses: Tensor | None, best: Tensor | None) -> None:
        """Add the arguments of `note` to the values recorded in this step."""
        experts = len(self.before)
        self.noted[: len(counts)] += counts
        if losses is not None:
            self.noted[experts + 1] += losses.double()
        if best is not None:
            self.noted[experts + MORE :] += best


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(
        saved_ctx: Any,
        y: Tensor,
        load: ExpertLoad,
        counts: Tensor,
        losses: Tensor | None,
        best: Tensor | None,
    ) -> Tensor:
        saved_ctx.load, saved_ctx.counts, saved_ctx.losses = load, counts, losses
        saved_ctx.best = best
        return y.view_as(y)

    @staticmethod
    def backward(saved_ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        saved_ctx.load.count(saved_ctx.counts, saved_ctx.losses, saved_ctx.best)
        return dy, None, None, None, None


class ExpertLoads(StepState):
    """The counts of all routers of a rank.

    counts, dropped, losses: of the last step's global batch, [layers, E], [layers] and [layers];
    None before the first step. Rows are in the order of `loads`.
    """

    def __init__(self, ctx: LayerContext) -> None:
        self.loads: list[ExpertLoad] = []
        self.ctx, self.rate = ctx, ctx.experts.bias_update_rate
        self.counts: Tensor | None = None
        self.dropped: Tensor | None = None
        self.losses: Tensor | None = None

    def add(self, load: ExpertLoad) -> None:
        """Add one more router."""
        self.loads.append(load)

    @property
    def nbytes(self) -> int:
        """Return the size of the message at the end of a step."""
        return sum(load.noted.nbytes for load in self.loads)

    def state(self) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """Return, for each router's weight, the counts of the last step, to save and to load."""
        return [(load.of[0], load.before) for load in self.loads]

    def begin_step(self) -> None:
        """Discard the values recorded since the last step."""
        each("zero_", [load.noted for load in self.loads])

    @torch.no_grad()
    def end_step(self, found_inf: Tensor) -> None:
        """Sum the counts over the ranks of the stage; update the bias, unless the router is frozen.

        found_inf: 1.0 if the update is skipped, and this with it.
        """
        total = torch.stack([load.noted for load in self.loads])  # [layers, E + MORE or 2 E + MORE]
        for axis in (self.ctx.tp,) * self.ctx.sp + (self.ctx.grid.dp_cp,):
            total = all_reduce_in_order(total, axis, LABEL)
        before = [load.before for load in self.loads]
        experts = len(before[0])
        counts = self.counts = total[:, :experts]
        self.dropped, self.losses = total[:, experts], total[:, experts + 1]
        best = total[:, experts + MORE :] if self.loads[0].counts_best else counts
        applies = found_inf == 0
        updated = torch.where(applies, best, torch.stack(before))
        each("copy_", before, updated.unbind())
        found = [(row, load.e_score_correction_bias) for row, load in enumerate(self.loads)]
        moving = [(i, b) for i, b in found if b is not None and self.loads[i].of[0].requires_grad]
        if moving:
            rows, biases = zip(*moving, strict=True)
            behind = counts.sum(1, keepdim=True) - counts * counts.shape[1]  # exact
            move = torch.sign(behind).to(biases[0].dtype) * self.rate
            moves = torch.where(applies, move, 0.0).unbind()
            each("add_", list(biases), [moves[i] for i in rows])
