# SPDX-License-Identifier: Apache-2.0
"""What is computed without a run.

model_profile           what is measured of the model on meta tensors (meta): parameters, FLOPs
rank_memory, matrices   a rank's parameters and how they are shared; the owners of full matrices
context_parallel        a rank's part of a row; a check that attention reaches the rest
obeyed_flags            flags that a model does not obey
pipeline_stages, simulate, play    pipeline stages by cost; a schedule proved and timed
"""
