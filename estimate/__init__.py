# SPDX-License-Identifier: Apache-2.0
"""What is computed without a run.

model_profile, rank_profile, saved_by_module    what is measured of the model on meta tensors (meta,
                        storages): parameters, FLOPs, what a stage keeps and sends
rank_memory             what a rank holds from step to step
activations, buffers    what comes and goes in a step
traffic                 what a rank sends in a step
context_parallel        a rank's part of a row; a check that attention reaches the rest
pipeline_stages, simulate    pipeline stages by cost; a schedule proved and timed
bucket_size             the size of gradient buckets, by simulation
dry_run, fit            the report of --dry-run, and which flag would make a run fit
"""
