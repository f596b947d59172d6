# SPDX-License-Identifier: Apache-2.0
"""Go back to the newest sound checkpoint of --save, and skip iterations.

A skipped iteration and its samples count, but are not trained on. Every later checkpoint lists the
skipped iterations, so that a resume skips the same ones.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from training.run.log import Log
from training.run.saver import Saver
from training.run.state import Run
from training.run.step import Step
from training.run.stop import Agreement
from training.settings.stages import waits_for

REWINDS = 3  # at most, to one checkpoint; after that the samples are not the cause


class Rewind:
    """Rewinds one run. Every rank makes the same calls."""

    def __init__(self, run: Run, saver: Saver, log: Log, agreement: Agreement) -> None:
        self.run, self.saver, self.log, self.agreement = run, saver, log, agreement
        self._went_back: Counter[int] = Counter()  # by the iteration of the checkpoint
        self.passed_over = saver.saved.passed_over
        self.passed_over.update(run.config.fault.iterations_to_skip)

    def begin(self) -> None:
        """Save the run's start if a flag may ask to go back to it, unless --save has it."""
        run, fault, save = self.run, self.run.config.fault, self.run.config.checkpoint.save
        answers = run.config.run.on_nan, fault.on_spike, fault.on_replica_mismatch
        if "rewind" in answers and save:
            there = self.saver.resume.folder == Path(save).resolve()
            if not run.iteration or not there:
                self.saver.save(run.iteration, run.consumed, must=True)

    def unfinished(self, total: int) -> bool:
        """Skip iterations where due; return whether a step of the run's `total` follows in this
        process: a stage of other settings needs a new one.

        If the last steps before the end are skipped, it saves.
        """
        run = self.run
        passed = self.pass_over(total)
        more = self._goes_on(total)
        if passed and not more and run.config.checkpoint.save:
            self.saver.save(run.iteration, run.consumed, must=True)
        return more

    def pass_over(self, total: int) -> bool:
        """Skip the next iterations as long as they are listed; return whether there were any."""
        run, passed = self.run, False
        while self._goes_on(total) and run.iteration + 1 in self.passed_over:
            step, passed = Step.next(run), True
            step.count(run)
            samples = f"samples {step.consumed} to {run.consumed - 1}"
            self.log.note(f"iteration {run.iteration} is skipped: {samples}")
        return passed

    def _goes_on(self, total: int) -> bool:
        """Return whether the next iteration is one of this process."""
        run = self.run
        return run.iteration < total and waits_for(run.config, run.consumed) is None

    def go_back(self, why: str, over: Iterable[int] = ()) -> None:
        """Load the newest sound checkpoint of --save; the run continues from its iteration.

        over: iterations to skip from now on. Raises FloatingPointError after REWINDS rewinds to the
        same checkpoint, and where there is no such checkpoint.
        """
        run = self.run
        self.passed_over.update(i for i in over if i > 0)
        self.agreement.close()  # discards the flags of the steps that are undone
        run.monitor.enter("load", f"going back from iteration {run.iteration}")
        before, found = run.iteration, self.saver.rewind()
        if found is None:
            raise FloatingPointError(f"{why}; --save has no valid checkpoint to go back to")
        run.iteration, run.consumed = found
        self._went_back[run.iteration] += 1
        if self._went_back[run.iteration] > REWINDS:
            raise FloatingPointError(
                f"{why}; going back to iteration {run.iteration} {REWINDS} times did not help: the "
                "cause is not in the skipped samples; start from an earlier checkpoint "
                "(--ckpt-step), or check the learning rate, the data and the machine"
            )
        self.log.note(f"{why}; going back from iteration {before} to {run.iteration}")
