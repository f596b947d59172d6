# SPDX-License-Identifier: Apache-2.0
"""Choices that are measured before the first step.

measure.py   the seconds of each matmul by each overlap method (--tp-comm-overlap auto)
overlap.py   the overlap method of each linear layer
"""
