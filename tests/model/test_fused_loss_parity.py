# SPDX-License-Identifier: Apache-2.0
"""--fused-linear-cross-entropy against the serial twin in fp64: loss, norm and every gradient, over
tensor parallelism, pipelines whose weight gradients wait, ZeRO, tied weights and masked tokens.
"""

import itertools
import random
from functools import cache

import pytest

from tests.model.twin import Twin, compare
from tests.sampling import sampled

BASE = dict(tp=1, dp=1, sp=False, recompute=None, tied=False, m=3, layers=3, chunk=13)


@pytest.fixture(scope="module")
def twins():
    """Return a function: case -> twin with the gradients of global batch 0, its loss and norm."""

    @cache
    def made(tied: bool, masks: bool, layers: int):
        twin = Twin(tied, layers)
        (loss,), (norm,) = twin.train(1, lr=0.0, clip=0.0, masks=masks)
        return twin, loss, norm

    return lambda case: made(case["tied"], case.get("masks", False), case["layers"])


def cases(size: int) -> list[dict]:
    """List the layouts of a world: every chunk has other columns, some of them padding."""
    found = []
    for tp in (t for t in (1, 2) if size // t in (1, 2)):
        for sp, tied, masks in itertools.product((False, True)[:tp], (False, True), (False, True)):
            found.append(BASE | dict(tp=tp, dp=size // tp, sp=sp, tied=tied, masks=masks))
    wide = [case | dict(zero=zero) for case in found if case["dp"] > 1 for zero in (1, 2, 3)]
    piped = [
        case | dict(dp=case["dp"] // 2, pp=2) | how
        for case in found
        if case["dp"] > 1 and not case["masks"]
        for how in (
            dict(schedule="1f1b", defer=True),
            dict(schedule="zb-h1"),
            dict(schedule="zb-v", recompute="full", layers=4),
        )
    ]
    if size == 4:
        piped += [
            BASE | dict(dp=2, pp=2, zero=3, schedule=how, tied=tied, gather=True)
            for how in ("1f1b", "zb-h1", "zb-v")
            for tied in (False, True)
            if how != "zb-v" or not tied
        ]
    return found + wide + piped


@pytest.mark.parametrize("size", sampled([2, 1], 2))
def test_a_sample(world, twins, size):
    some = cases(size)
    compare(world, twins, size, some[:: max(1, len(some) // 6)])


@pytest.mark.prove
@pytest.mark.parametrize("size", [2, 4])
def test_more_cases(world, twins, size):
    every = cases(size)
    compare(world, twins, size, random.Random(9).sample(every, len(every) // 2))
