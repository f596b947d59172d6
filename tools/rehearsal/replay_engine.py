# SPDX-License-Identifier: Apache-2.0
"""Let the pipeline's engine replay micro-batches (tools/rehearsal/replay.py) where they repeat."""

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpu.gradients import run_deferred
from mpu.pipeline import engine
from mpu.pipeline.steps import Step
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from tools.rehearsal.events import Alloc, Free
from tools.rehearsal.record import Recorder
from tools.rehearsal.replay import PATTERN, Replay

RealRun, real_begin_step = engine._Run, ParamAndGradBuffer.begin_step


def let_go(recorder: Recorder) -> None:
    """Let autograd's thread of the device end what it still holds of the last backward.

    On a GPU it holds that, a tensor or two, until the next backward begins.
    """
    if recorder.device == "cpu":
        return
    first = len(recorder.events)
    torch.zeros((), device=recorder.device, requires_grad=True).mul(1).backward()
    events = recorder.events[first:]
    own = {e.storage for e in events if isinstance(e, Alloc)}
    recorder.events[first:] = [e for e in events if isinstance(e, Free) and e.storage not in own]


def install(recorder: Recorder, full: bool) -> None:
    """Let the engine replay micro-batches. full: run them all.

    A sum of gradients starts when so many micro-batches have given theirs as run for real.
    """
    replay = recorder.replay = Replay(recorder)

    def begin_fewer(sink: ParamAndGradBuffer, micro_batches: int = 1) -> None:
        real_begin_step(sink, micro_batches if full else min(micro_batches, PATTERN + 2))

    ParamAndGradBuffer.begin_step = begin_fewer  # type: ignore[method-assign, assignment]

    class Run(RealRun):  # type: ignore[misc, valid-type]
        """The engine's execution of a schedule, which replays what repeats."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            actions = self.schedule.ranks[self.rank]
            count = 1 + max(action.micro_batch for action in actions)
            replay.begin(count, self.training and not full)

        def _make(self) -> Tensor:
            return torch.empty(self.shape, dtype=self.engine.dtype, device=self.engine.device)

        def _forward(self, step: Step, hidden: Tensor | None) -> Tensor | None:
            _, chunk, i = step.action
            if not replay.copied(i):
                forward = super()._forward
                return replay.run("F", chunk, i, lambda: forward(step, hidden), hidden)
            if hidden is not None:
                replay.inputs[chunk, i] = hidden
            return replay.copy("F", chunk, i, None if step.stage == self.last else self._make)

        def _backward(self, step: Step, dy: Tensor | None, fused: bool) -> Tensor | None:
            _, chunk, i = step.action
            if not replay.copied(i):
                backward = super()._backward

                def work() -> Tensor | None:
                    out = backward(step, dy, fused)
                    let_go(recorder)
                    return out

                out = replay.run("B", chunk, i, work)
                if (chunk, i) in self.deferred:
                    works = self.deferred[chunk, i]
                    last = partial(replay.run, "W", chunk, i, partial(run_deferred, works))
                    self.deferred[chunk, i] = deque([last])
                return out
            later = not fused or (step.stage == self.last and i < self.schedule.deferred)
            make = None if step.stage == 0 else self._make
            out = replay.copy("B", chunk, i, make, full_backward=not later)
            if later:
                self.deferred[chunk, i] = deque([partial(replay.copy, "W", chunk, i, None)])
            return out

    engine._Run = Run  # type: ignore[misc]
