# SPDX-License-Identifier: Apache-2.0
"""What follows where replicas differ (mpu/zero/replica_check.py): name, replay, stop or go back.

Where a run repeats itself bit for bit (on a CPU, or with --deterministic-mode) the steps since the
newest sound checkpoint are made again, and the replicas compared again at the same step:

    the replicas agree, on the majority's bits or on one side's    a transient fault; the other side
                                                                   was wrong, also of a pair
    they differ again                                              a persistent fault
"""

import json
from collections.abc import Callable
from typing import Any

from mpu.comm.collectives import gather_bytes
from mpu.zero.replica_check import Difference, ReplicaCheck
from training.batch_size import global_batch_size
from training.learning_rate import decoupled_learning_rate, learning_rate


class Replicas:
    """Checks the replicas of a run. guard: training.run.guard.Guard. step: train_step."""

    def __init__(self, guard: Any, step: Callable[..., Any]) -> None:
        self.guard, self.step = guard, step
        run = guard.run
        self.exact = run.device.type == "cpu" or run.config.run.deterministic_mode
        self._check = ReplicaCheck(run.grid, run.optimizer, self.exact)

    def check(self) -> bool:
        """Compare; return whether the run went back. Raises FloatingPointError as the flags say."""
        guard, run = self.guard, self.guard.run
        run.monitor.action = f"comparing the replicas of iteration {run.iteration}"
        found = self._check.run()
        if not found:
            return False
        what = f"replicas differ at iteration {run.iteration}: {told(found)}"
        stop = run.config.fault.on_replica_mismatch == "stop"
        if not (self.exact and run.config.checkpoint.save):
            why = "there is no --save" if self.exact else "without --deterministic-mode bits vary"
            why = f"{what}; the steps since were not made again ({why})"
            if stop:
                raise FloatingPointError(why)
            guard.go_back(why)
            return True
        again, sides = self._replay(what, found)
        if again:
            raise FloatingPointError(
                f"{what}; after the same steps again from the checkpoint {told(again)}: a "
                "persistent fault, take that machine out"
            )
        what += f"; after the same steps again from the checkpoint they agree{sides}: a transient "
        what += "fault"
        if stop:
            raise FloatingPointError(what)
        guard.log.note(f"{what}; going on from there")
        return True

    def _replay(self, what: str, found: list[Difference]) -> tuple[list[Difference], str]:
        """Make the steps since the checkpoint again; compare again, and with what was found."""
        guard, run = self.guard, self.guard.run
        config, end, first = run.config, run.iteration, found[0]
        guard.go_back(f"{what}; making the steps again")
        guard.pass_over(end)
        while run.iteration < end:
            size = global_batch_size(config, run.consumed)
            batches = guard.loaders.train.next_global_batch(run.consumed, size)
            batches = [batch.to(run.device) for batch in batches]
            rates = (f(config, run.consumed) for f in (learning_rate, decoupled_learning_rate))
            run.monitor.enter("step", f"making iteration {run.iteration + 1} again")
            self.step(run, batches, *rates)
            run.iteration += 1
            run.consumed += size
            guard.pass_over(end)
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


def told(found: list[Difference]) -> str:
    """Return the surest differences as a sentence."""
    sure = [d for d in found if len(d.suspects) == len(found[0].suspects)]
    more = len(found) - 1
    text = str(sure[0])
    return f"{text} (and {more} more tensors)" if more else text
