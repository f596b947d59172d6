# SPDX-License-Identifier: Apache-2.0
"""How pairs are spread over experts where no values say it."""

import pytest

from mpu.layers.dispatch import even, spread


@pytest.mark.parametrize("total, experts, ranks", [(48, 8, 4), (7, 8, 2), (96, 4, 4), (0, 4, 2)])
@pytest.mark.parametrize("skew", [1.0, 1.25, 2.0])
def test_the_first_rank_has_skew_times_the_mean(total, experts, ranks, skew):
    found = spread(total, experts, ranks, skew)
    assert sum(found) == total and len(found) == experts and min(found) >= 0
    own = experts // ranks
    first, rest = found[:own], found[own:]
    assert max(first) - min(first) <= 1 and max(rest) - min(rest) <= 1
    if skew == 1.0:
        assert found == even(total, experts)
    else:
        assert sum(first) == round(total * skew / ranks)


def test_one_rank_has_all():
    assert spread(10, 4, 1, 1.5) == [3, 3, 2, 2]
