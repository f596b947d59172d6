# SPDX-License-Identifier: Apache-2.0
"""Attention sinks in a model (sinks_fork.py): a vector that is cut as heads are.

Training on tensor and context parallel ranks is that of one rank, and decoding that of forward.
The arithmetic itself is compared in tests/mpu/layers/attention/test_attend.py.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.model.context_cases import COMM
from tests.model.test_worked_forks import decode_in, equal
from tests.model.twin import run_cases
from tests.sampling import sampled

PATH = str(Path(__file__).with_name("sinks_fork.py"))
ALONE: dict[str, Any] = dict(
    tp=1, dp=1, m=1, sp=False, recompute=None, tied=False, file=PATH, lr=1e-2, clip=0.5, masks=True,
    rows=4, s=48, zero=0,
)  # fmt: skip
WAYS = [
    dict(tp=2, sp=True, recompute="selective"),
    dict(tp=2),
    dict(cp=2, comm="a2a"),
    dict(cp=2, comm="all_gather", recompute="selective"),
]
MORE_WAYS = [
    *(dict(cp=4, comm=c) for c in COMM),
    dict(tp=2, sp=True, cp=2, comm="a2a"),
    dict(tp=2, dp=2, sp=True, zero=3, gather=True, recompute="full"),
    dict(pp=2, cp=2, m=2, comm="p2p", schedule="1f1b"),
]


@pytest.mark.parametrize(
    "size, ways", sampled([(2, WAYS[::2]), (2, WAYS[1::2]), (4, MORE_WAYS)], 3)
)
def test_ranks_train_as_one(world, size, ways):
    (one,) = world(1).run(run_cases, [ALONE], 2)[0]
    assert any("sinks" in name for name, *_ in one["grads"])
    for rank in world(size).run(run_cases, [ALONE | way for way in ways], 2):
        for way, got in zip(ways, rank, strict=True):
            equal(got, one, str(way))


def test_decoding_is_forward(world):
    world(1).run(decode_in, [ALONE])
