# SPDX-License-Identifier: Apache-2.0
"""Matmuls that overlap with their collectives.

method    OverlapMethod, Gathering: what a method does; none, replicated, shared memory
ring      by messages, on any backend
cuda      on GPUs: one kernel that moves rows and multiplies
choices   OverlapMap: which matmul takes which method; frozen when the run begins
"""
