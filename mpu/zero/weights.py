# SPDX-License-Identifier: Apache-2.0
"""ZeRO level 3: each rank keeps its part of the weights, and a block's are gathered for their use.

    take(block i)      free block i-1, start the gather of block i+1, wait for block i's

Which block comes next is known from the step before: the order of uses, forward and backward, is
written down and followed. Where it differs (an evaluation after a step, another number of
micro-batches) a block is gathered when it is asked for, and the new order is learnt. All ranks use
their blocks in one order, so they gather in one order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpu.comm.collectives import all_gather
from mpu.comm.handle import DONE, Handle, Label
from mpu.grid import Axis


@dataclass(eq=False)
class FlatWeights:
    """Where the weights of some parameters lie: flat, padded, one part a data-parallel rank."""

    params: list[tuple[str, nn.Parameter, int]]  # name, parameter, offset
    length: int
    low: int  # this rank owns [low, high)
    high: int
    sharded: bool  # `weights` come and go
    own: Tensor = field(init=False)  # [low, high)
    weights: Tensor | None = field(init=False, default=None)  # all of them, while they are whole
    gathering: Handle = field(init=False, default=DONE)
    users: int = field(init=False, default=0)  # uses that have begun and not ended
    waiting: int = field(init=False, default=0)  # uses whose gradients this step still waits for

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory that stays, and move whole weights there."""
        if self.sharded:
            self.own = torch.zeros(self.high - self.low, dtype=dtype, device=device)
            return
        self.show(torch.zeros(self.length, dtype=dtype, device=device), copy=True)
        self.own = self.weights[self.low : self.high]  # type: ignore[index]

    def show(self, flat: Tensor, copy: bool = False) -> None:
        """Let the parameters be views of `flat`; copy: bring their values along."""
        self.weights = flat
        for _, param, start in self.params:
            home = flat[start : start + param.numel()].view(param.shape)
            if copy:
                home.copy_(param.data)
            param.data = home

    def owned(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (name, low, high, offset) of the parameters of which this rank owns elements [low,
        high) of the bucket."""
        for name, param, start in self.params:
            low, high = max(start, self.low), min(start + param.numel(), self.high)
            if low < high:
                yield name, low, high, start

    def hide(self) -> None:
        """Free the whole weights. What reads a parameter now sees not-a-numbers."""
        self.gathering.wait()
        self.weights = None
        nothing = self.own.new_full((1,), torch.nan)
        for _, param, _ in self.params:
            param.data = nothing.expand(param.shape)


class Gatherer:
    """Gathers sharded weights before their use and frees them after it.

    ahead: gather the next block under the computation of this one. keep: what this step has
    gathered stays until its gradients are done. peak: the most bytes that were whole at once.
    """

    def __init__(self, axis: Axis, ahead: bool, keep: bool) -> None:
        self.axis, self.ahead, self.keep = axis, ahead, keep
        self.whole: list[FlatWeights] = []
        self.peak = 0
        self._current: FlatWeights | None = None
        self._order: list[FlatWeights] = []  # of this pass
        self._known: list[FlatWeights] = []  # of the last pass of this kind
        self._kind, self._orders = 0, dict[int, list[FlatWeights]]()

    def begin(self, kind: int) -> None:
        """Begin a pass: kind is a step's number of micro-batches, or 0 for all that is no step."""
        if self._order:
            self._orders[self._kind] = self._order
        self._kind, self._order, self._known = kind, [], self._orders.get(kind, [])
        for block in list(self.whole):
            assert not block.users, "a weight is in use at the end of a pass"
            self._free(block)

    def take(self, block: FlatWeights) -> None:
        """Begin a use: start the gather, if it is not under way, and that of the next block."""
        block.users += 1
        if block is self._current:
            return
        following = self._follow(block) if self.ahead else None
        for other in list(self.whole):
            busy = other.users or (self.keep and other.waiting)
            if not busy and other not in (block, following):
                self._free(other)
        self._current = block
        for wanted in (block, following):
            if wanted is not None and wanted.weights is None:
                self._gather(wanted)

    def give_back(self, block: FlatWeights) -> None:
        """Free a block whose part in this step is over."""
        if block in self.whole and not block.users:
            self._free(block)

    def _follow(self, block: FlatWeights) -> FlatWeights | None:
        """Write a use down; return what was used next last time."""
        at = len(self._order)
        self._order.append(block)
        if self._known[at : at + 1] != [block]:
            self._known = []
        return self._known[at + 1] if at + 1 < len(self._known) else None

    def _gather(self, block: FlatWeights) -> None:
        weights = block.own.new_empty(block.length)
        block.show(weights)
        label = Label(block, "gather")
        _, block.gathering = all_gather(block.own, self.axis, True, weights, label)
        self.whole.append(block)
        live = sum(b.length * b.own.element_size() for b in self.whole)
        self.peak = max(self.peak, live)

    def _free(self, block: FlatWeights) -> None:
        block.hide()
        self.whole.remove(block)
        if block is self._current:
            self._current = None
