# SPDX-License-Identifier: Apache-2.0
"""What watches a training step, and decides what follows it.

intervals.py        what the flags ask for: --save-interval, --eval-interval, --train-iters, ...
guard.py            a norm that is not finite, a spike; first_nonfinite.py names the first bad value
replicas.py         replicas of a weight that differ
rewind.py           go back to a checkpoint, pass over iterations
slow_ranks.py       the rank or the link that slows all others down
digests.py          --log-digests: a line of digests, to compare runs by
profile.py          --profile, --record-memory-history
stepped.py          that torchrun's attempt made a step

training/run/step.py says what a watcher is, and how their decisions are combined. The log, the
memory report and the notes on overlap are watchers, too. train() of pretrain_llama.py
lists all of them, in order.
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
