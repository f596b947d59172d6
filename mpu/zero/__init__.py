# SPDX-License-Identifier: Apache-2.0
"""Weights and gradients in flat buckets, ZeRO stages 0 to 3.

param_and_grad_buffer   the sink of gradients; the order in which buckets are sent
bucket                  one bucket's life in a step
reduce                  the collectives of its sum
bucket_layout           which parameters share a bucket, and over which axes
gather                  stage 3: gather a block for its use
norm                    the global norm
gradient_check          a run's first gradients against the parameters' placements
replica_check           what must be equal bit for bit on several ranks; digest: of a step
"""
