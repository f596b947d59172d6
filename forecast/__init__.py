# SPDX-License-Identifier: Apache-2.0
"""What a run would do, by recording the program itself, above which this room stands.

recording    the program's own step, as one rank of any world, on tensors without memory
traffic      what a rank sends in it
dry_run      the report of --dry-run: memory of each rank, work, traffic
fit          which flag would make a run fit
memory_picture    what --memory-picture draws
"""
