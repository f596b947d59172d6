# SPDX-License-Identifier: Apache-2.0
"""What watches a training step, and decides what follows it.

step.py             Step, Watcher, Decision; combine: the one rule by which decisions are combined
intervals.py        what the flags ask for: --save-interval, --eval-interval, --train-iters, ...
guard.py            a norm that is not finite, a spike; first_nonfinite.py names the first bad value
replicas.py         replicas of a weight that differ
rewind.py           go back to a checkpoint, pass over iterations
slow_ranks.py       the rank or the link that slows all others down
profile.py          --profile, --record-memory-history

Other watchers are the log (training/run/log.py), the saver (saver.py), the memory report
(memory.py) and the notes on overlap (overlap.py). train() of pretrain_llama.py lists all of them,
in order.
"""
