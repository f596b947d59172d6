# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one operation a file.

all_gather_matmul multiplies while peers' rows arrive, matmul_reduce_scatter while they leave.
tiles.py says in plain Python which tile waits for which rows. signals, tickets, product: parts of
these two. Only the kernels' modules need triton: this package and tiles.py import without it.
declared.py: what a kernel requires of its arguments and costs is declared above it, for tests and
the rehearsal; by_address.py has the same of csrc's and torch's kernels. launch.py launches them.
"""
