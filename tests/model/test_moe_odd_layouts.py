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
    "ep across cp and dp": ALL | dict(cp=2, dp=2, ep=4, zero=3, moe=QWEN3),
    "ep larger than dp": ALL | TP | dict(cp=2, ep=4, zero=2, moe=SHARED),
    "one expert a rank": ALL | dict(dp=4, ep=4, zero=1, moe=SPARSE | dict(num_experts=4)),
    "one expert a rank, gathered": dict(dp=2, cp=2, ep=4, zero=3, moe=SPARSE | dict(num_experts=4)),
    "ranks without rows": ALL | dict(dp=4, ep=4, zero=3, m=2, moe=SPARSE | dict(num_experts=128)),
    "ranks without rows, gathered": dict(dp=4, ep=4, m=2, moe=SPARSE | dict(num_experts=128)),
    "micro-batches of one row": dict(dp=4, ep=2, zero=2, m=2, moe=QWEN3),
    "uneven stages, sparse and dense": ALL
    | PP
    | dict(layers=5, schedule="1f1b", layout="Et|ttttL", zero=1)
    | dict(moe=SPARSE | dict(moe_layer_freq=(1, 0, 0, 1, 1))),
    "experts on one stage only": ALL
    | PP
    | dict(zero=3, schedule="zb-h1", moe=SPARSE | dict(moe_layer_freq=(0, 0, 1, 1))),
    "documents and masked tokens": ALL | dict(dp=2, cp=2, ep=2, masks=True, zero=1, moe=SHARED),
    "two instances of the optimizer": ALL | dict(dp=4, ep=2, zero=1, instances=2),
    "two instances, weights shared": dict(dp=4, ep=2, zero=3, instances=2),
    "sums after each micro-batch": ALL | dict(dp=4, ep=2, zero=2, each=True, m=2),
    "sums after each micro-batch, weights shared": dict(
        dp=4, ep=2, zero=3, each=True, m=2, gather=True
    ),
    "rings over tp": TP | dict(dp=2, ep=4, path="ring", moe=SHARED),
    "tied ends of a V": ALL | PP | dict(zero=3, schedule="zb-v", v=2, tied=True, moe=QWEN3),
    "heads travel over cp": ALL | dict(cp=2, dp=2, ep=4, comm="a2a"),
    "dp fastest": TP | dict(dp=2, ep=2, order="dp-tp-cp-pp", zero=1),
    "pp fastest": PP | dict(order="pp-dp-tp-cp", zero=3, schedule="1f1b"),
    "weight gradients wait": ALL | PP | dict(schedule="1f1b", defer=True),
    "three of four experts": ALL
    | dict(dp=2, cp=2, ep=2, moe=SPARSE | dict(num_experts=4, moe_router_topk=3)),
    "one expert a token": ALL
    | dict(dp=4, ep=4, zero=1)
    | dict(moe=SPARSE | dict(moe_router_topk=1, moe_router_pre_softmax=True)),
    "the loss in chunks": ALL | TP | dict(dp=2, ep=4, chunk=7),
}


@pytest.mark.prove
def test_an_odd_layout_is_the_twins(world: Any) -> None:
    held(world, [BASE | each for each in ODD.values()])
