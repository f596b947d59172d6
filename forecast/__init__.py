# SPDX-License-Identifier: Apache-2.0
"""What a run would do, by running the program itself, above which this room stands.

recording    the program's own step, as one rank of any world, on tensors without memory
like_ranks, moments    a pipeline's ranks that differ in numbers only are recorded once
traffic      what a rank sends in it
dry_run      the report of --dry-run: memory of each rank, work, traffic
fit          which flag would make a run fit
memory_picture    what --memory-picture draws
obeyed_flags    which flags a forked model does not obey
device_file, devices    what a GPU can do, as numbers
explainer    the parts of make explain: a step's messages, in order
rehearsal    the parts of --rehearse: a step on a simulated GPU, with its streams and its time
planner      the parts of tools/plan.py: layouts, their memory and their time
"""
