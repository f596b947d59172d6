# SPDX-License-Identifier: Apache-2.0
"""Matmuls in float8.

recipe    Float8, a Recipe of mpu/layers/linear.py
rows      rows of float8: codes and their scales in one tensor
delayed   scales computed from earlier steps
cuda      torch's scaled_mm
"""
