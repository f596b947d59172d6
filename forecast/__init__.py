# SPDX-License-Identifier: Apache-2.0
"""Forecast what a run would do, by running the program's own code, which this room stands above.

recording    record the program's own step, as one rank of any world, on tensors without memory
like_ranks, moments    use one recording for all pipeline ranks that do the same kind of work
traffic      the collectives and messages of a rank in a step
dry_run      the report of --dry-run: memory of each rank, work, traffic
fit          which flag would make a run fit
memory_picture    the picture of --memory-picture
obeyed_flags    which flags a forked model does not obey
device_file, devices    the peaks, sizes and latencies of a GPU and its links
explainer    the parts of make explain: a step's messages, in order
rehearsal    the parts of --rehearse: a step on a simulated GPU, with its streams and its time
planner      the parts of tools/plan.py: layouts, their memory and their time
"""
