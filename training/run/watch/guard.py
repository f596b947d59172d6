# SPDX-License-Identifier: Apache-2.0
"""Decide what follows a step with a non-finite norm or a spike, the same on every rank.

    a norm that is not finite    the update was skipped on every rank; --on-nan: stop, skip, rewind
    a spike                      --on-spike: report, stop, rewind

A spike is a step whose loss or gradient norm is far above those of the recent steps:

    z = (x - median) / max(1.4826 x median of |x - median|, floor)

over the last WINDOW finite steps; x is the loss and the logarithm of the gradient norm. A few
outliers do not affect median and median deviation, unlike mean and standard deviation. The
computation stays on the device. No step waits for the result: it is reduced together with the
ranks' other flags, and takes effect one step later, or at once if a save, an evaluation or the end
of the run follows.
"""

import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from training.data.loader import Loader
from training.run.log import Log
from training.run.state import Run, RunSchedule
from training.run.step import BACK, Decision, Step
from training.run.stop import Agreement, StepFlags
from training.run.watch.first_nonfinite import find_first
from training.run.watch.rewind import Rewind

SKIPS = 10  # skipped updates in a row that end a run
WINDOW, LEAST = 128, 32  # steps to compare with, at most and at least
FLOOR = (0.01, 0.05)  # least deviation: of the loss, relative to its median; of log(norm)
NAMES = ("loss", "gradient norm")


class Guard:
    """Judges the steps of one run, and acts on the ranks' flags about signals and time.

    data: the training data. rerun: forward and backward of micro-batches without an update
    (first_nonfinite.py). Every rank makes the same calls.
    """

    def __init__(
        self,
        run: Run,
        rewind: Rewind,
        data: Loader,
        log: Log,
        agreement: Agreement,
        rerun: RunSchedule,
    ) -> None:
        self.run, self.rewind, self.data, self.log = run, rewind, data, log
        self.agreement, self._rerun = agreement, rerun
        fault = run.config.fault
        self.on_nan, self.on_spike = run.config.run.on_nan, fault.on_spike
        self._spikes = Spikes(fault.spike_z_score, run.device) if self.on_spike else None
        self._before: Step | None = None  # the last step, if it is not judged yet
        self._skipped = 0  # skipped updates in a row, up to the step judged last

    def spiked(self, step: Step) -> tuple[Tensor, ...]:
        """Return the spike flag of the step just made, for the ranks to agree on."""
        if self._spikes is None:
            return ()
        return (self._spikes.flag(step.iteration, step.loss, step.norm),)

    def after_step(self, step: Step) -> Decision:
        """Judge the previous step; judge this one too if it is the last, or a save or evaluation
        follows.

        So every saved step has been agreed on by all ranks, and a signal does not wait for an
        evaluation that has not begun. Each step is judged once.
        """
        agreed, decided = step.agreed, step.decided
        if self._before is not None and self._rolls_back(self._before, agreed):
            return BACK
        self._before = step
        ends = agreed.signal or agreed.over or decided.stop
        if ends or decided.save or decided.evaluate:
            begin = time.perf_counter()
            now = self.agreement.close()  # waits for this step, whose line is written
            self.log.interval.seconds += time.perf_counter() - begin
            if self._rolls_back(step, now):
                return BACK
            agreed |= now
            self._before = None
        stop = agreed.signal or agreed.over
        save = stop and bool(self.run.config.checkpoint.save)
        return Decision(stop=stop, signal=agreed.signal, save=save, skipped=self._skipped > 0)

    def _rolls_back(self, step: Step, agreed: StepFlags) -> bool:
        """Judge a step by the flags of all ranks; return whether the run went back.

        Raises FloatingPointError if the run is to end.
        """
        i = step.iteration
        self._skipped = self._skipped + 1 if agreed.skipped else 0
        if agreed.skipped:
            what = f"the gradient norm was not finite at iteration {i}: that update was "
            what += "skipped on every rank"
            if self._skipped == 1:
                what = "; ".join([what, *self._first_nonfinite(step)])
            return self._answer(self.on_nan, what, [i])
        if agreed.spiked and self._spikes is not None:
            what = f"a spike at iteration {i}: {self._spikes.describe(i)}"
            # the update before may be the cause
            return self._answer(self.on_spike or "", what, [i - 1, i])
        return False

    def _answer(self, how: str, what: str, iterations: list[int]) -> bool:
        if how == "stop":
            raise FloatingPointError(what)
        if how == "skip" and self._skipped >= SKIPS:
            raise FloatingPointError(
                f"{what}; it is the {SKIPS}th in a row, so the cause is a weight or the program, "
                "not the data; earlier checkpoints are unaffected"
            )
        if how != "rewind":
            self.log.note(what)
            return False
        self.rewind.go_back(what, over=iterations)
        self._before, self._skipped = None, 0
        return True

    def _first_nonfinite(self, step: Step) -> list[str]:
        """Rerun the step's micro-batches and return sentences on the findings."""
        run = self.run
        if run.config.fault.rerun_mode == "disabled":
            return []
        i = step.iteration
        run.monitor.action = f"running iteration {i} again, as its norm was not finite"
        batches = step.batches(self.data, run.device)
        return find_first(run, self.data.dataset, batches, self._rerun, f"of iteration {i} again")


def nanmedian(x: Tensor) -> Tensor:
    """Return the lower median of each row without its NaNs: x [n, k] -> [n, 1].

    The result has the bits of torch.nanmedian, which on CUDA raises under --deterministic-mode: its
    kernel also returns an index, which varies from run to run
    (aten/src/ATen/native/cuda/Sorting.cpp).
    """
    count = (~x.isnan()).sum(dim=1, keepdim=True)  # a sort puts NaN last
    return x.sort(dim=1).values.gather(1, ((count - 1) // 2).clamp(min=0))


class Seen(NamedTuple):
    """One step: its iteration, (loss, norm) and their z-scores, on the device."""

    iteration: int
    values: Tensor
    scores: Tensor


class Spikes:
    """Compare each step with those before it. threshold: the z-score above which it is a spike."""

    def __init__(self, threshold: float, device: torch.device | str) -> None:
        self.threshold = threshold
        self._window = torch.full((2, WINDOW), torch.nan, dtype=torch.float64, device=device)
        self._seen: deque[Seen] = deque(maxlen=2)

    @torch.no_grad()
    def flag(self, iteration: int, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1 if the step is a spike, else 0: a scalar on the device. A NaN is no spike."""
        values = torch.stack([loss.double(), norm.double()])
        x = torch.stack([values[0], values[1].log()])
        middle = nanmedian(self._window)
        deviation = 1.4826 * nanmedian((self._window - middle).abs())[:, 0]
        middle = middle[:, 0]
        floor = torch.stack([FLOOR[0] * middle[0].abs(), torch.full_like(middle[1], FLOOR[1])])
        scores = (x - middle) / torch.maximum(deviation, floor)
        enough = self._window[0].isfinite().sum() >= LEAST
        spike = (scores > self.threshold).any() & enough
        moved = torch.cat([self._window[:, 1:], x[:, None]], dim=1)
        self._window = torch.where(x.isfinite().all(), moved, self._window)
        self._seen.append(Seen(iteration, values, scores))
        return spike.double()

    def describe(self, iteration: int) -> str:
        """Return the values of one of the last two steps, as text. Waits for the device."""
        found = next((seen for seen in self._seen if seen.iteration == iteration), None)
        if found is None:
            return ""
        values, scores = found.values.tolist(), found.scores.tolist()
        return ", ".join(
            f"{name} {value:.4g} (z-score {score:.1f})"
            for name, value, score in zip(NAMES, values, scores, strict=True)
        )
