# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one operation per file.

all_gather_matmul multiplies while peers' rows arrive, matmul_reduce_scatter while they are sent.
tiles.py computes in plain Python which tile waits for which rows. signals, tickets, product: parts
of these two. Only the modules of kernels need triton: this package and tiles.py import without it.
declared.py: declarations of a kernel's requirements and cost, above the kernel, for tests and the
rehearsal; by_address.py has those of csrc's and torch's kernels. launch.py launches kernels.
"""
