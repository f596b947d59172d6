# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that multiply while peers' rows arrive (all_gather_matmul) or leave
(matmul_reduce_scatter); tiles.py says in plain Python which tile waits for what. Only the kernels'
own modules need triton: this package and tiles.py import without it."""
