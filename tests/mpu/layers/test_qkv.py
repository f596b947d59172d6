# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a key/value head make what one rank makes, forward and backward."""

from types import SimpleNamespace

import pytest

from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.qkv import SharedHeadsLinear, local_heads, qkv_linear

H, D, HEADS, S, B = 10, 8, 8, 4, 3


@pytest.mark.parametrize(
    "heads, groups, size, words",
    [
        (6, 2, 4, "heads must be a multiple of 4"),
        (12, 3, 4, "groups a multiple or a divisor of 4"),
        (12, 6, 4, "groups a multiple or a divisor of 4"),
    ],
)
def test_heads_that_do_not_divide_are_refused(heads, groups, size, words):
    ctx = SimpleNamespace(tp=SimpleNamespace(size=size), grid=Grid())
    with pytest.raises(ValueError, match=words):
        local_heads(heads, groups, D, ctx)


def test_a_grid_for_other_heads_is_refused():
    ctx = LayerContext(Grid(4, 4, launch=Launch(0, 4), query_groups=2))
    assert local_heads(8, 2, D, ctx) == (2, 1) and local_heads(8, 2, 6, ctx) == (2, 1)
    with pytest.raises(ValueError, match="where 2 ranks share a key/value head"):
        local_heads(8, 1, D, ctx)
    with pytest.raises(ValueError, match="a head of size 7 .* cut over 2 of the 4"):
        local_heads(8, 2, 7, ctx)
    assert isinstance(qkv_linear(H, (64, 16, 16), ctx=ctx), SharedHeadsLinear)
