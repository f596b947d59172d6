# SPDX-License-Identifier: Apache-2.0
"""Matmuls that run beside their collectives: the methods, and which matmul takes which."""
