# SPDX-License-Identifier: Apache-2.0
"""What the flags ask for after a step: to evaluate, sample, save or stop every so many steps."""

import gc

from training.arguments import RunConfig
from training.config import Config
from training.run.step import CONTINUE, Decision, Step
from training.stages import waits_for


def due(interval: int | None, iteration: int, last: bool = False) -> bool:
    """Return whether what is done every `interval` steps (None: never) is due after this one.

    last: it is the last step, after which it is done too.
    """
    if not interval:
        return False
    return last or iteration % interval == 0


def evaluation_due(run: RunConfig, iteration: int, last: bool = False) -> bool:
    """Return whether the held-out data are evaluated after this step; last: of the run.

    Whoever counts a run's evaluations asks here. The one of --eval-at-start is before a step, and
    with --eval-iters 0 an evaluation that is due takes no data.
    """
    if last:
        return bool(run.eval_interval) or run.eval_at_start
    return iteration >= (run.start_eval_at_iter or 0) and due(run.eval_interval, iteration)


class Intervals:
    """Asks for what is due by the flags. total: the run's last iteration."""

    def __init__(self, config: Config, total: int) -> None:
        self.config, self.total = config, total

    def after_step(self, step: Step) -> Decision:
        """Ask for it. A step that stops is always saved where there is a --save."""
        config, i = self.config, step.iteration
        last = i == self.total
        stop = last or due(config.run.exit_interval, i)
        stop = stop or waits_for(config, step.consumed + step.size) is not None
        save = stop or due(config.checkpoint.save_interval, i)
        return Decision(
            stop=stop,
            save=save and bool(config.checkpoint.save),
            copy=due(config.fault.peer_checkpoint, i),
            evaluate=evaluation_due(config.run, i, last),
            sample=due(config.log.sample_interval, i),
        )


class GarbageCollection:
    """Collects Python's garbage at the same steps on all ranks: --manual-gc."""

    def __init__(self, config: Config) -> None:
        self.every = config.run.manual_gc_interval if config.run.manual_gc else None
        if config.run.manual_gc:
            gc.disable()
            gc.collect()

    def after_step(self, step: Step) -> Decision:
        """Collect where it is due."""
        if due(self.every, step.iteration):
            gc.collect()
        return CONTINUE
