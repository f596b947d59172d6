# SPDX-License-Identifier: Apache-2.0
"""Layouts of experts that are odd: each has its serial twin's loss, norm and gradients."""

from typing import Any

import pytest

from tests.model.moe_twin import SPARSE
from tests.model.test_moe_parity import BASE, KINDS, held

ALL, SHARED, QWEN3 = dict(dispatch="alltoall"), KINDS["sigmoid, shared"], KINDS["qwen3"]
TP = dict(tp=2, sp=True)
PP = dict(pp=2, dp=2, ep=2, m=2)
ODD: dict[str, dict[str, Any]] = {
    "one expert a rank": ALL | dict(dp=4, ep=4, zero=1, moe=SPARSE | dict(num_experts=4)),
    "ranks without rows": ALL | dict(dp=4, ep=4, zero=3, m=2, moe=SPARSE | dict(num_experts=128)),
    "uneven stages, sparse and dense": ALL
    | PP
    | dict(layers=5, schedule="1f1b", layout="Et|ttttL", zero=1)
    | dict(moe=SPARSE | dict(moe_layer_freq=(1, 0, 0, 1, 1))),
    "experts on one stage only": ALL
    | PP
    | dict(zero=3, schedule="zb-h1", moe=SPARSE | dict(moe_layer_freq=(0, 0, 1, 1))),
    "documents and masked tokens": ALL | dict(dp=2, cp=2, ep=2, masks=True, zero=1, moe=SHARED),
    "two instances, weights shared": dict(dp=4, ep=2, zero=3, instances=2),
    "sums after each micro-batch, weights shared": dict(
        dp=4, ep=2, zero=3, each=True, m=2, gather=True
    ),
    "rings over tp": TP | dict(dp=2, ep=4, path="ring", moe=SHARED),
    "pp fastest": PP | dict(order="pp-dp-tp-cp", zero=3, schedule="1f1b"),
    "weight gradients wait": ALL | PP | dict(schedule="1f1b", defer=True),
    "one expert a token": ALL
    | dict(dp=4, ep=4, zero=1)
    | dict(moe=SPARSE | dict(moe_router_topk=1, moe_router_pre_softmax=True)),
}


@pytest.mark.prove
def test_an_odd_layout_is_the_twins(world: Any) -> None:
    held(world, [BASE | each for each in ODD.values()])
