# SPDX-License-Identifier: Apache-2.0
"""Watchers of a training step, which decide what follows it.

intervals.py        flags with intervals: --save-interval, --eval-interval, --train-iters, ...
guard.py            non-finite norms and spikes; first_nonfinite.py finds the first bad value
replicas.py         replicas of a weight that differ
rewind.py           goes back to a checkpoint, skips iterations
slow_ranks.py       finds the rank or the link that slows all others down
digests.py          --log-digests: a line of digests, to compare runs
profile.py          --profile, --record-memory-history
stepped.py          records that torchrun's attempt made a step

training/run/step.py defines watchers and how their decisions are combined. The log, the memory
report and the notes on overlap are watchers, too. train() of pretrain_llama.py lists all of them,
in order.
"""

from training.run.watch.digests import Digests
from training.run.watch.guard import Guard
from training.run.watch.intervals import GarbageCollection, Intervals
from training.run.watch.profile import Profile
from training.run.watch.replicas import Replicas
from training.run.watch.rewind import Rewind
from training.run.watch.slow_ranks import SlowRanks
from training.run.watch.stepped import Stepped

__all__ = [
    "Digests", "GarbageCollection", "Guard", "Intervals", "Profile", "Replicas", "Rewind",
    "SlowRanks", "Stepped",
]  # fmt: skip
