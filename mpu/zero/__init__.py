# SPDX-License-Identifier: Apache-2.0
"""Weights and gradients in flat buckets, ZeRO stages 0 to 3.

param_and_grad_buffer   the sink of gradients; the order in which buckets are reduced
bucket                  the state of one bucket during a step
reduce                  the collectives of its sum
bucket_layout           which parameters share a bucket, and over which axes
gather                  stage 3: gather a block's weights before use
norm                    the global norm
gradient_check          checks a run's first gradients against the parameters' placements
replica_check           checks that replicas are equal bit for bit; digest: of gradients and weights
"""
