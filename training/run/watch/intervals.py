# SPDX-License-Identifier: Apache-2.0
"""Actions after a step that flags ask for at intervals: evaluate, sample, save or stop."""

import gc

from training.run.step import CONTINUE, Decision, Step
from training.settings.config import Config
from training.settings.stages import waits_for


def due(interval: int | None, iteration: int) -> bool:
    """Return whether an action of every `interval` steps (None: never) is due after this step."""
    return bool(interval) and _times(interval, iteration - 1, iteration) > 0


def evaluations_due(config: Config, after: int, until: int, total: int) -> int:
    """Return the number of evaluations that follow the steps from after + 1 to `until`.

    The run's last step, `total`, is followed by one, too. The one of --eval-at-start comes before a
    step and does not count. With --eval-iters 0 an evaluation that is due reads no data.
    """
    run = config.run
    every, start = run.eval_interval, run.start_eval_at_iter or 0
    times = _times(every, max(after, start - 1), until)
    if not every and not run.eval_at_start or not after < total <= until:
        return times
    return times + (total < start or not due(every, total))


def still_due(config: Config, iteration: int, total: int) -> dict[str, int]:
    """Return how many times each kind of work is still due from this iteration's end on."""
    after = iteration - 1  # the work after this step is not done yet
    every = config.checkpoint.save_interval or total
    saves = _times(every, after, total) + _ends_between(every, after, total, total)
    return {
        "validation": evaluations_due(config, after, total, total),
        "sample": _times(config.log.sample_interval, after, total),
        "save": saves if config.checkpoint.save else 0,
    }


def _times(interval: int | None, after: int, until: int) -> int:
    """Return how many multiples of the interval are in after + 1 ... until."""
    return max(0, until // interval - after // interval) if interval else 0


def _ends_between(interval: int | None, after: int, until: int, total: int) -> int:
    """Return 1 if the last step is in after + 1 ... until and is no multiple of the interval."""
    return int(after < total <= until and total % interval != 0) if interval else 0


class Intervals:
    """Asks for the actions that are due. total: the run's last iteration."""

    def __init__(self, config: Config, total: int) -> None:
        self.config, self.total = config, total

    def after_step(self, step: Step) -> Decision:
        """Return the actions due after a step. The last step is always saved if --save is given."""
        config, i = self.config, step.iteration
        last = i == self.total
        stop = last or due(config.run.exit_interval, i)
        if config.stages:
            stop = stop or waits_for(config, step.consumed + step.size) is not None
        save = stop or due(config.checkpoint.save_interval, i)
        return Decision(
            stop=stop,
            save=save and bool(config.checkpoint.save),
            evaluate=evaluations_due(config, i - 1, i, self.total) > 0,
            sample=due(config.log.sample_interval, i),
        )


class GarbageCollection:
    """Runs Python's garbage collector at the same steps on all ranks: --manual-gc."""

    def __init__(self, config: Config) -> None:
        self.every = config.run.manual_gc_interval
        gc.disable()
        gc.collect()

    def after_step(self, step: Step) -> Decision:
        """Collect garbage if it is due, or an evaluation follows."""
        if due(self.every, step.iteration) or step.decided.evaluate:
            gc.collect()
        return CONTINUE
