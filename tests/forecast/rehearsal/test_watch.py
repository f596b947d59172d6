# SPDX-License-Identifier: Apache-2.0
"""The bytes that a kernel moves: each tensor once each way, of a table only its rows."""

import pytest
import torch

from forecast.rehearsal.watch import moved

X, Y = torch.zeros(10), torch.zeros(10)
TABLE, PLACES, ROWS = torch.zeros(100, 4), torch.zeros(3, dtype=torch.long), torch.zeros(3, 4)


@pytest.mark.parametrize(
    "op, read, written, nbytes",
    [
        ("add", [X, Y], [torch.zeros(10)], 120),
        ("add", [X, X], [torch.zeros(10)], 80),
        ("add_", [X, Y], [X], 120),  # what it adds to is read, too
        ("_fused_adamw_", [X, Y], [X], 120),
        ("copy_", [X, Y], [X], 80),
        ("zero_", [X], [X], 40),
        ("embedding", [TABLE, PLACES], [ROWS], 48 + 24 + 48),
        ("index_add_", [TABLE, PLACES, ROWS], [TABLE], 48 + 24 + 48 + 48),
        ("index_add_", [X[:2], PLACES, ROWS], [X[:2]], 8 + 24 + 48 + 8),
    ],
)
def test_bytes_of_a_kernel(op, read, written, nbytes):
    assert moved(op, read, written) == nbytes
