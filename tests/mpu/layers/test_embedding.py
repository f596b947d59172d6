# SPDX-License-Identifier: Apache-2.0
"""The rows of other ranks are exactly zero."""

import pytest
import torch

from mpu.layers.embedding import _keep_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_of_other_ranks_are_zero_whatever_was_looked_up(dtype):
    x = torch.randn(6, 2, 3, dtype=dtype)
    mine = torch.arange(12).view(6, 2) % 3 == 0
    x[1, 0], x[2, 1], x[4, 0] = torch.nan, torch.inf, -torch.inf
    expected = x.masked_fill(~mine[..., None], 0)
    got = _keep_rows(x, mine)
    assert got is x and torch.equal(got, expected)
    assert not torch.signbit(got[~mine]).any()
