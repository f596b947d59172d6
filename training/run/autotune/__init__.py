# SPDX-License-Identifier: Apache-2.0
"""What is measured before the first step, and chosen by it.

measure.py   the seconds of each matmul, by overlap methods or by arithmetics
overlap.py   --tp-comm-overlap: the method of each linear layer
float8.py    --fp8-auto: the layers that are in float8
"""
