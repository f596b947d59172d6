# SPDX-License-Identifier: Apache-2.0
"""Matmuls in float8: the recipes, rows of codes with their scales, and how a weight travels."""
