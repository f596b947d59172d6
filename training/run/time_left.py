# SPDX-License-Identifier: Apache-2.0
"""Estimate the remaining time of a run: its steps, and the evaluations, samples and saves between.

Each kind is estimated by its own last durations. A kind that has not been measured yet counts as
zero, so the first estimates of a run cover its steps only.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

STEPS, OTHERS = 10, 3  # how many of the last durations count
LIKE = {"test": "validation"}  # {a kind not measured yet: the kind whose durations are used}


class TimeLeft:
    """The durations of the parts of a run. clock: returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = deque[float](maxlen=STEPS)
        self._others: dict[str, deque[float]] = {}

    def step(self, seconds: float) -> None:
        """Record the seconds of a step, or the mean of several."""
        self._steps.append(seconds)

    @contextmanager
    def measuring(self, kind: str) -> Iterator[None]:
        """Measure the block, which does work between two steps: an evaluation, a sample, a save."""
        began = self._clock()
        yield
        self._others.setdefault(kind, deque(maxlen=OTHERS)).append(self._clock() - began)

    def seconds(self, steps: float, due: Mapping[str, int]) -> float:
        """Return the estimated seconds of `steps` steps and `due[kind]` times each other kind."""
        left = steps * _mean(self._steps)
        for kind, times in due.items():
            took = self._others.get(kind) or self._others.get(LIKE.get(kind, kind))
            left += times * _mean(took or ())
        return left


def _mean(seconds: Collection[float]) -> float:
    return sum(seconds) / max(1, len(seconds))
