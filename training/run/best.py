# SPDX-License-Identifier: Apache-2.0
"""Know the lowest loss on one set of held-out data so far, and which checkpoint has it.

What is on disk counts: a loss whose save failed is none (training/checkpoint/evaluated.py). Every
rank makes the same calls, and what they return follows from losses that are the same on all ranks
and from saves of which all ranks know the end.
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

    digests: {set: SHA-256 of what is evaluated on}. wait(): waits for the save under way, and
    returns once all ranks know how it ended.
    """

    def __init__(self, name: str, digests: Mapping[str, str], wait: Callable[[], None]) -> None:
        self.set = name or next(iter(digests), "")
        self._digest, self._wait = digests.get(self.set, ""), wait
        self.saved: Evaluated | None = None  # the best one, which is on disk
        self.pending: Evaluated | None = None  # a better one, of which a save is under way
        self._last: Evaluated | None = None  # the last evaluation
        self.written = -1  # the step that was saved last; the thread of a save sets it

    def find(self, root: Path, last: int) -> tuple[list[Any] | None, str]:
        """Return the best of the checkpoints under `root` up to step `last`, as [step, loss], and a
        line on those that were evaluated on other data ("" where none was). On one rank.
        """
        found = [(n, step, e) for n, (step, e) in evaluations(root).items() if step <= last]
        here = self.set, self._digest
        same = sorted((e.loss, step, n) for n, step, e in found if e.comparable == here)
        others = [name for name, _, e in found if e.comparable != here]
        line = ""
        if others:
            line = f"--keep-best: {others[0]} was evaluated on other held-out data: the best of "
            line += "those stays, and losses are not compared with its"
        for loss, step, name in same:
            with suppress(CheckpointError, OSError):
                Checkpoint(root / name).check_sizes()
                return [step, loss], line
        return None, line

    def begin(self, found: list[Any] | None) -> None:
        """Go on from what find() returned."""
        self.saved = None if found is None else self._evaluated(*found)
        self.pending = self._last = None

    def _evaluated(self, step: int, loss: float) -> Evaluated:
        return Evaluated(step, Evaluation(self.set, self._digest, loss))

    def evaluated(self, step: int, losses: Mapping[str, float]) -> bool:
        """Take the losses of an evaluation; return whether this step is the best so far, so that it
        is to be saved. An evaluation of no token, whose loss is NaN, never is.
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
        """Wait for the save under way, and count what it has saved."""
        self._wait()
        if self.pending is not None and self.pending.step == self.written:
            self.saved = self.pending
        self.pending = None

    def saving(self, step: int, only: bool) -> dict[str, Any]:
        """Return what the state of a step that is being saved says of its evaluation.

        only: nothing else asks for the save. No other save is under way.
        """
        if self._last is None or self._last.step != step:
            return {}
        if self.saved is None or self._last.loss < self.saved.loss:
            self.pending, self.written = self._last, -1
        return {EVALUATION: asdict(replace(self._last.evaluation, only=only))}

    @property
    def names(self) -> list[str]:
        """Return the directories of the best checkpoint, and of a better one on its way."""
        known = (self.saved, self.pending)
        return [step_name(each.step) for each in known if each is not None]
