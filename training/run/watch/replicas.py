# SPDX-License-Identifier: Apache-2.0
"""Handle replicas that differ (mpu/zero/replica_check.py): report, replay, stop or go back.

If a run is bitwise reproducible (on a CPU, or with --deterministic-mode), the steps since the
newest sound checkpoint are replayed, and the replicas compared again at the same step:

    the replicas agree, on the majority's bits or on one side's    a transient fault; the other side
                                                                   was wrong, even in a pair
    they differ again                                              a persistent fault
"""

import json
from collections.abc import Callable

from torch import Tensor

from mpu.comm.collectives import gather_bytes
from mpu.zero.replica_check import Difference, ReplicaCheck
from training.data.batch import Batch
from training.data.loader import Loader
from training.run.log import Log
from training.run.state import Run
from training.run.step import BACK, CONTINUE, Decision, Step
from training.run.watch.intervals import due
from training.run.watch.rewind import Rewind

TrainStep = Callable[[Run, list[Batch], float, float | None], tuple[Tensor, Tensor, Tensor]]


class Replicas:
    """Compares the replicas of a run every --check-replicas steps, and before each save.

    data: the training data. train_step: of pretrain_llama.py.
    """

    def __init__(
        self, run: Run, rewind: Rewind, data: Loader, log: Log, train_step: TrainStep
    ) -> None:
        self.run, self.rewind, self.data, self.log = run, rewind, data, log
        self.train_step, self.every = train_step, run.config.fault.check_replicas
        self.exact = run.device.type == "cpu" or run.config.run.deterministic_mode
        self._check = ReplicaCheck(run.grid, run.optimizer, self.exact)

    def after_step(self, step: Step) -> Decision:
        """Compare if it is due or a save follows. Raises FloatingPointError to end the run."""
        if not (step.decided.save or due(self.every, step.iteration)):
            return CONTINUE
        run = self.run
        run.monitor.action = f"comparing the replicas of iteration {run.iteration}"
        found = self._check.run()
        if not found:
            return CONTINUE
        what = f"replicas differ at iteration {run.iteration}: {described(found)}"
        stop = run.config.fault.on_replica_mismatch == "stop"
        if not (self.exact and run.config.checkpoint.save):
            why = "there is no --save" if self.exact else "without --deterministic-mode bits differ"
            why = f"{what}; the steps since the checkpoint were not replayed ({why})"
            if stop:
                raise FloatingPointError(why)
            self.rewind.go_back(why)
            return BACK
        again, sides = self._replay(what, found)
        if again:
            raise FloatingPointError(
                f"{what}; after a replay from the checkpoint {described(again)}: the fault is "
                "persistent, so remove that machine"
            )
        what += f"; after a replay from the checkpoint they agree{sides}: the fault was transient"
        if stop:
            raise FloatingPointError(what)
        self.log.note(f"{what}; continuing from there")
        return CONTINUE  # it is the same iteration again: what is due after it still is

    def _replay(self, what: str, found: list[Difference]) -> tuple[list[Difference], str]:
        """Replay the steps since the checkpoint and compare the replicas again.

        Returns the differences after the replay and, where there are none, words on the ranks that
        were wrong before it.
        """
        run, end, first = self.run, self.run.iteration, found[0]
        self.rewind.go_back(f"{what}; replaying the steps")
        self.rewind.pass_over(end)
        while run.iteration < end:
            step = Step.next(run)
            batches = step.batches(self.data, run.device)
            run.monitor.enter("step", f"replaying iteration {step.iteration}")
            self.train_step(run, batches, step.lr, step.decoupled_lr)
            step.count(run)
            self.rewind.pass_over(end)
        again = self._check.run()
        if again:
            return again, ""
        rows = (row for rows in self._check.hashes().values() for row in rows)
        mine = next((int(h) for what, h in rows if what == first.what), None)
        every = gather_bytes(json.dumps(mine).encode(), run.grid.world, run.device)
        right = json.loads(every[min(first.hashes)])
        wrong = [f"rank {rank}" for rank, value in first.hashes.items() if value != right]
        if len(wrong) == len(first.hashes):
            return again, ""
        return again, f", and {' and '.join(wrong)} had other bits"


def described(found: list[Difference]) -> str:
    """Return the first difference, and the number of the others, as text."""
    sure = [d for d in found if len(d.suspects) == len(found[0].suspects)]
    more = len(found) - 1
    text = str(sure[0])
    return f"{text} (and {more} more tensors)" if more else text
