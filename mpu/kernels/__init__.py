# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, an operation a file; costs.py says what each moves. all_gather_matmul multiplies
while peers' rows arrive, matmul_reduce_scatter while they leave, and tiles.py says in plain Python
which tile waits for what. Only the kernels' own modules need triton: this package, costs.py and
tiles.py import without it."""
