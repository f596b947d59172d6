# SPDX-License-Identifier: Apache-2.0
"""Matmuls that overlap with their collectives.

method    OverlapMethod and Gathering: the interface; none, replicated, shared memory
ring      point-to-point messages, on any backend
cuda      GPUs: kernels that send or receive rows while they multiply
choices   OverlapMap: the method of each matmul; fixed when the run begins
"""
