# SPDX-License-Identifier: Apache-2.0
"""Track the lowest loss on one set of held-out data, and the checkpoint that has it.

Only checkpoints on disk count: a loss whose save failed is ignored
(training/checkpoint/evaluated.py). Every rank makes the same calls and gets the same results, since
the losses and the outcomes of the saves are the same on all ranks.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from training.checkpoint import Checkpoint, CheckpointError
from training.checkpoint.evaluated import EVALUATION, Evaluation
from training.checkpoint.manifest import step_name
from training.checkpoint.retain import evaluations


@dataclass(frozen=True)
class Evaluated:
    """A step, and the loss of its weights."""

    step: int
    evaluation: Evaluation

    @property
    def loss(self) -> float:
        """Return the loss in nats a token."""
        return self.evaluation.loss


class Best:
    """The best checkpoint of one run, by --keep-best.

    digests: {set: SHA-256 of its evaluation data}. wait(): waits for the save in progress, and
    returns once all ranks know how it ended.
    """

    def __init__(self, name: str, digests: Mapping[str, str], wait: Callable[[], None]) -> None:
        self.set = name or next(iter(digests), "")
        self._digest, self._wait = digests.get(self.set, ""), wait
        self.saved: Evaluated | None = None  # the best one on disk
        self.pending: Evaluated | None = None  # a better one, whose save is in progress
        self._last: Evaluated | None = None  # the last evaluation
        self.written = -1  # the step that was saved last; the save's thread sets it

    def find(self, root: Path, last: int) -> tuple[list[Any] | None, str]:
        """Return the best of the checkpoints under `root` up to step `last`, as [step, loss], and a
        line on those that were evaluated on other data ("" if none was). One rank calls it.
        """
        found = [(n, step, e) for n, (step, e) in evaluations(root).items() if step <= last]
        here = self.set, self._digest
        same = sorted((e.loss, step, n) for n, step, e in found if e.comparable == here)
        others = [name for name, _, e in found if e.comparable != here]
        line = ""
        if others:
            line = f"--keep-best: {others[0]} was evaluated on other held-out data, so its loss is "
            line += "not compared with this run's; the best checkpoint of that data is kept"
        for loss, step, name in same:
            with suppress(CheckpointError, OSError):
                Checkpoint(root / name).check_sizes()
                return [step, loss], line
        return None, line

    def begin(self, found: list[Any] | None) -> None:
        """Start from the result of find()."""
        self.saved = None if found is None else self._evaluated(*found)
        self.pending = self._last = None

    def _evaluated(self, step: int, loss: float) -> Evaluated:
        return Evaluated(step, Evaluation(self.set, self._digest, loss))

    def evaluated(self, step: int, losses: Mapping[str, float]) -> bool:
        """Record the losses of an evaluation; return whether this step is the best so far and is
        therefore to be saved. An evaluation of no tokens, whose loss is NaN, never is.
        """
        self._last, loss = None, losses.get(self.set, math.nan)
        if not math.isfinite(loss):
            return False
        self._last = self._evaluated(step, loss)
        if self.pending is not None and loss >= self.pending.loss:
            self.settle()  # whether that is the best depends on how its save ends
        known = [each for each in (self.saved, self.pending) if each is not None]
        return all(loss < each.loss and step != each.step for each in known)

    def settle(self) -> None:
        """Wait for the save in progress; if it wrote the pending step, that is the best one."""
        self._wait()
        if self.pending is not None and self.pending.step == self.written:
            self.saved = self.pending
        self.pending = None

    def saving(self, step: int, only: bool) -> dict[str, Any]:
        """Return the entry on its evaluation for the state of a step that is being saved.

        {} if the step was not evaluated. only: nothing else asks for the save. No other save may be
        in progress.
        """
        if self._last is None or self._last.step != step:
            return {}
        if self.saved is None or self._last.loss < self.saved.loss:
            self.pending, self.written = self._last, -1
        return {EVALUATION: asdict(replace(self._last.evaluation, only=only))}

    @property
    def names(self) -> list[str]:
        """Return the directories of the best checkpoint, and of a better one being saved."""
        known = (self.saved, self.pending)
        return [step_name(each.step) for each in known if each is not None]
