# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one operation a file.

all_gather_matmul multiplies while peers' rows arrive, matmul_reduce_scatter while they leave.
tiles.py says in plain Python which tile waits for which rows. signals, tickets, product: parts of
these two. Only the kernels' modules need triton: this package and tiles.py import without it.
by_address.py is a table of what each call reads by address, which tests and the rehearsal check.
tools/rehearsal/kernel_costs.py says what each kernel reads, writes and multiplies.
"""
