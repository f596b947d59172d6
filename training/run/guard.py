# SPDX-License-Identifier: Apache-2.0
"""Decide what follows a step whose numbers are wrong, the same on every rank.

    a norm that is not finite    the update was skipped on every rank; --on-nan: stop, skip, rewind
    a spike                      --on-spike: report, stop, rewind
    replicas that differ         --check-replicas; --on-replica-mismatch: stop, rewind

rewind loads the newest sound checkpoint of --save again and passes over the step: its iteration and
its samples count, and nothing is trained on them. What was passed over stands in every later
checkpoint, so that a resume passes over the same.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from training.batch_size import global_batch_size
from training.run.first_nonfinite import Rerun, find_first
from training.run.replicas import Replicas
from training.run.spikes import Spikes
from training.run.stop import Agreement, Decision, Heard

SKIPS = 10  # skipped updates in a row that end a run
REWINDS = 3  # to one checkpoint; then the fault is not in the samples


class Guard:
    """Judges the steps of one run. run: pretrain_llama.Run; saver, loaders, log: of the run.

    rerun: forward and backward of micro-batches without an update (first_nonfinite.py). step:
    train_step. Every rank makes the same calls.
    """

    def __init__(
        self,
        run: Any,
        saver: Any,
        loaders: Any,
        log: Any,
        agreement: Agreement,
        *,
        rerun: Rerun,
        step: Callable[..., Any],
    ) -> None:
        self.run, self.saver, self.loaders, self.log = run, saver, loaders, log
        self.agreement, self._rerun = agreement, rerun
        config, fault = run.config, run.config.fault
        self.on_nan, self.on_spike = config.run.on_nan, fault.on_spike
        self.rewinds = "rewind" in (self.on_nan, self.on_spike, fault.on_replica_mismatch)
        self._spikes = Spikes(fault.spike_z_score, run.device) if self.on_spike else None
        self._replicas = Replicas(self, step) if fault.check_replicas else None
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=2)  # iteration, consumed, size
        self._judged = run.iteration
        self._skipped = 0  # updates in a row, up to the step judged last
        self._went_back: Counter[int] = Counter()  # by the iteration of the checkpoint
        self.passed_over: set[int] = saver.passed_over
        self.passed_over.update(fault.iterations_to_skip)

    def goes_on(self, total: int) -> bool:
        """Return whether a step of the run's `total` follows, after those that are passed over.

        Keeps the run's start as a state to go back to, and saves where the last steps are passed.
        """
        run = self.run
        if self.rewinds and not run.iteration and not self._went_back:
            self.saver.save(0, 0, must=True)
            self._went_back[0] = 0
        passed = self.pass_over(total)
        if passed and run.iteration >= total and run.config.checkpoint.save:
            self.saver.save(run.iteration, run.consumed, must=True)
        return bool(run.iteration < total)

    def spiked(self, loss: Any, norm: Any) -> tuple[Any, ...]:
        """Note the step that was just made, before it is counted; return the flag to agree on."""
        run = self.run
        iteration = run.iteration + 1
        self._steps.append((iteration, run.consumed, global_batch_size(run.config, run.consumed)))
        return () if self._spikes is None else (self._spikes.judge(iteration, loss, norm),)

    def goes_back(self, heard: Heard, now: bool = False) -> bool:
        """Judge the step before this one, or this one (`now`), by what all ranks said of it.

        Return whether the run is back at a checkpoint. Raises FloatingPointError where it is to
        end. A step is judged once.
        """
        if len(self._steps) < 2 - now or self._steps[-1 if now else -2][0] <= self._judged:
            return False
        iteration, consumed, size = self._steps[-1 if now else -2]
        self._judged = iteration
        self._skipped = self._skipped + 1 if heard.skipped else 0
        if heard.skipped:
            what = f"the gradient norm was not finite at iteration {iteration}: that update was "
            what += "skipped on every rank"
            if self._skipped == 1:
                what = "; ".join([what, *self._first_nonfinite(iteration, consumed, size)])
            return self._answer(self.on_nan, what, [iteration])
        if heard.spiked and self._spikes is not None:
            what = f"a spike at iteration {iteration}: {self._spikes.describe(iteration)}"
            # the update before may be the cause
            return self._answer(self.on_spike or "", what, [iteration - 1, iteration])
        return False

    def _answer(self, how: str, what: str, iterations: list[int]) -> bool:
        if how == "stop":
            raise FloatingPointError(what)
        if how == "skip" and self._skipped >= SKIPS:
            raise FloatingPointError(
                f"{what}; it is the {SKIPS}th in a row: no data is that bad, so a weight or this "
                "program is; the checkpoints from before are still there"
            )
        if how != "rewind":
            self.log.note(what)
            return False
        self.passed_over.update(i for i in iterations if i > 0)
        self.go_back(what)
        return True

    def go_back(self, why: str) -> None:
        """Load the newest sound checkpoint of --save; every rank is at its iteration then.

        Raises FloatingPointError where that was done REWINDS times already.
        """
        run = self.run
        self.agreement.close()  # what it says of the steps that are taken back
        run.monitor.enter("load", f"going back from iteration {run.iteration}")
        before, found = run.iteration, self.saver.rewind()
        if found is None:
            raise FloatingPointError(f"{why}; there is no sound checkpoint under --save to go to")
        run.iteration, run.consumed = found
        self._went_back[run.iteration] += 1
        if self._went_back[run.iteration] > REWINDS:
            raise FloatingPointError(
                f"{why}; going back to iteration {run.iteration} did not help {REWINDS} times: the "
                "cause is not in the samples passed over; start from an earlier checkpoint "
                "(--ckpt-step), or look at the learning rate, the data and the machine"
            )
        self.log.note(f"{why}; going back from iteration {before} to {run.iteration}")
        self._judged, self._skipped = run.iteration, 0
        self._steps.clear()

    def pass_over(self, total: int) -> bool:
        """Count the iterations that follow and are to be passed over; return whether there are."""
        run, passed = self.run, False
        while run.iteration < total and run.iteration + 1 in self.passed_over:
            first, passed = run.consumed, True
            run.iteration += 1
            run.consumed += global_batch_size(run.config, first)
            samples = f"samples {first} to {run.consumed - 1}"
            self.log.note(f"iteration {run.iteration} is passed over: {samples}")
        return passed

    @property
    def skipping(self) -> bool:
        """Whether the last step that was judged was skipped."""
        return self._skipped > 0

    def saves(self, decision: Decision) -> bool:
        """Return whether to save now. A skipped step is saved only where the run ends with it.

        Its weights are those of a step before, and a save would push out an older checkpoint.
        """
        return decision.save and (decision.stop or not self.skipping)

    def check_replicas(self, saves: bool) -> bool:
        """Compare replicas if that is due or a save follows; return whether the run went back.

        Raises FloatingPointError where they differ and the run is to end.
        """
        every = self.run.config.fault.check_replicas
        if self._replicas is None or not (saves or self.run.iteration % every == 0):
            return False
        return self._replicas.check()

    def _first_nonfinite(self, iteration: int, consumed: int, size: int) -> list[str]:
        """Run the step's micro-batches again and return sentences on what was found."""
        run = self.run
        if run.config.fault.rerun_mode == "disabled":
            return []
        run.monitor.action = f"running iteration {iteration} again, as its norm was not finite"
        batches = self.loaders.train.next_global_batch(consumed, size)
        batches = [batch.to(run.device) for batch in batches]
        during = f"of iteration {iteration} again"
        return find_first(run, self.loaders.train.dataset, batches, self._rerun, during)
