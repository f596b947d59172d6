# SPDX-License-Identifier: Apache-2.0
"""One training step, its watchers, and the decision on what follows it.

for each watcher: decision = watcher.after_step(step)
combine(decisions): back > stop > save
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from training.data.batch import Batch
from training.data.loader import Loader
from training.run.state import Run
from training.run.stop import StepFlags
from training.settings.batch_size import global_batch_size
from training.settings.learning_rate import decoupled_learning_rate, learning_rate


@dataclass(frozen=True)
class Decision:
    """What one watcher asks for after a step, or what follows the step; the same on every rank."""

    back: bool = False  # the run has gone back to a checkpoint: the step no longer counts
    stop: bool = False  # this step is the last one
    signal: bool = False  # the reason for the stop is a signal
    skipped: bool = False  # the update was skipped: the weights are those of an earlier step
    save: bool = False
    evaluate: bool = False
    evaluate_after_save: bool = False  # set by combine() only: no watcher asks for it
    sample: bool = False
    done: bool = False  # this watcher has finished, and is not called again

    @property
    def hurry(self) -> bool:
        """Whether a save must not prune: there is no time, or an older checkpoint is better."""
        return self.signal or self.skipped


CONTINUE, BACK, DONE = Decision(), Decision(back=True), Decision(done=True)


def combine(decisions: Iterable[Decision]) -> Decision:
    """Combine the decisions of all watchers of a step.

    back        nothing follows: no evaluation, no sample, no save
    stop        a save is made even if the update was skipped
    skipped     otherwise no save: it would displace an older checkpoint
    signal      evaluate after the save, as a signal's grace period may be short
    """
    decided = union(decisions)
    if decided.back:
        return BACK
    return Decision(
        stop=decided.stop,
        signal=decided.signal,
        skipped=decided.skipped,
        save=decided.save and (decided.stop or not decided.skipped),
        evaluate=decided.evaluate and not decided.signal,
        evaluate_after_save=decided.evaluate and decided.signal,
        sample=decided.sample,
    )


def union(decisions: Iterable[Decision]) -> Decision:
    """Return a decision with every field that any of the decisions sets."""
    found = list(decisions)
    names = [each.name for each in fields(Decision)]
    return Decision(**{name: any(getattr(each, name) for each in found) for name in names})


NOT_YET = torch.tensor(torch.nan)


@dataclass(eq=False)
class Step:
    """One training step. loss, norm, found_inf: as train_step returns them, on the device."""

    iteration: int  # counted from 1
    consumed: int  # samples before it
    size: int  # samples of its global batch
    lr: float
    decoupled_lr: float | None
    begin: float = field(default_factory=time.perf_counter)
    waited: float = 0.0  # seconds spent waiting for data
    micro_batches: list[Batch] = field(default_factory=list)  # this rank's, once they are read
    loss: Tensor = NOT_YET
    norm: Tensor = NOT_YET
    found_inf: Tensor = NOT_YET
    auxiliary: Tensor | None = None  # the auxiliary part of the loss
    agreed: StepFlags = StepFlags()  # what all ranks reported about the step before
    values: dict[str, Any] = field(default_factory=dict)  # for its line of the log, if it has one
    decisions: list[Decision] = field(default_factory=list)  # of the watchers called so far

    @classmethod
    def next(cls, run: Run) -> "Step":
        """Return the next step of a run: its number, its samples, its learning rates."""
        config, consumed = run.config, run.consumed
        return cls(
            run.iteration + 1,
            consumed,
            global_batch_size(config, consumed),
            learning_rate(config, consumed),
            decoupled_learning_rate(config, consumed),
        )

    def batches(self, data: Loader, device: torch.device) -> list[Batch]:
        """Return this rank's micro-batches."""
        batches = data.next_global_batch(self.consumed, self.size)
        self.micro_batches = [batch.to(device) for batch in batches]
        return self.micro_batches

    def count(self, run: Run) -> None:
        """Advance the run's iteration and samples past this step."""
        run.iteration, run.consumed = self.iteration, self.consumed + self.size

    @property
    def decided(self) -> Decision:
        """Return the union of the decisions of the watchers called so far."""
        return union(self.decisions)


class Watcher(Protocol):
    """Is called after each step, on every rank."""

    def after_step(self, step: Step) -> Decision:
        """Return what is to follow the step. Raises FloatingPointError to end the run."""


def after_step(step: Step, watchers: list[Watcher]) -> Decision:
    """Call each watcher, up to one that goes back; return what follows the step.

    A watcher that is done is removed from the list.
    """
    for watcher in list(watchers):
        decision = watcher.after_step(step)
        step.decisions.append(decision)
        if decision.done:
            watchers.remove(watcher)
        if decision.back:
            break
    return combine(step.decisions)
