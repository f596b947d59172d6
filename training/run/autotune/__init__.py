# SPDX-License-Identifier: Apache-2.0
"""--tp-comm-overlap: what is measured before the first step, and chosen by it.

measure.py   the seconds of each matmul by each overlap method
overlap.py   the method of each linear layer
"""
