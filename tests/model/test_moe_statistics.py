# SPDX-License-Identifier: Apache-2.0
"""What a router counts: balance losses, z-loss, load and bias, against megatron-core's numbers and
a router of topk and scatter that shares nothing with model/moe.py.

f of a balance loss counts the k best scores of all experts, without groups and without the bias of
the choice (DeepSeek-V3 technical report, eq. 18; megatron-core 0.16.1,
compute_routing_scores_for_aux_loss). Load and bias are of the experts that were chosen.
"""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from model import moe
from mpu.context import ExpertOptions, LayerContext
from mpu.layers.expert_load import ExpertLoads
from mpu.recompute import Decisions
from tests.model.test_moe_parity import BASE, held
from tests.model.test_moe_router import BIASED

KINDS = ("aux_loss", "seq_aux_loss", "lagged_global_aux_loss")
RATE = 0.01
# tokens, experts, k, groups, groups chosen, score; megatron-core 0.16.1's aux loss at coefficient 1
# of logits_of(tokens, experts): switch_load_balancing_loss_func of the map and scores that
# compute_routing_scores_for_aux_loss returns. The softmax there is in fp32
MEGATRON = [
    ((64, 16, 4, 4, 2, "softmax"), 1.014755548688342),
    ((64, 16, 4, 4, 2, "sigmoid"), 1.0032972116999241),
    ((64, 16, 2, 4, 1, "softmax"), 1.0135341408464456),
    ((64, 16, 2, 4, 1, "sigmoid"), 1.0033285033657073),
    ((96, 32, 8, 8, 4, "softmax"), 1.0146633869839832),
    ((96, 32, 8, 8, 4, "sigmoid"), 1.0040867847894872),
    ((64, 16, 4, 4, 4, "softmax"), 1.014755548688342),
    ((64, 16, 4, 0, 0, "softmax"), 1.014755548688342),
]


def logits_of(tokens: int, experts: int) -> Tensor:
    i = torch.arange(tokens * experts, dtype=torch.float64).view(tokens, experts)
    return (i * 0.7).sin() * 3 + (i * i * 0.013).cos()


def router(
    experts: int, k: int, groups: int = 0, best: int = 0, score: str = "softmax", *,
    bias: bool = False, pre: bool = False, balance: Any = (), z: float = 0.0,
    capacity: float | None = None,
) -> moe.SparseMLP:  # fmt: skip
    config = moe.MoEConfig(
        100, 32, 16, 2, 2, 2, num_experts=experts, moe_router_topk=k, moe_ffn_hidden_size=4,
        moe_router_score_function=score, moe_router_enable_expert_bias=bias,
        moe_router_num_groups=groups, moe_router_group_topk=best, moe_router_pre_softmax=pre,
    )  # fmt: skip
    options = ExpertOptions(
        balance=balance, z_coefficient=z, bias_update_rate=RATE, capacity_factor=capacity
    )
    kind = torch.float64
    return moe.SparseMLP(
        config, LayerContext(dtype=kind, accumulate=kind, experts=options), Decisions()
    )


def routed(mlp: moe.SparseMLP, logits: Tensor, b: int) -> tuple[moe.Routing, float]:
    """Return what a router decides on logits [T, E], and the mean of its losses."""
    sigmoid = mlp.config.moe_router_score_function == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits
    routing = mlp.decide(scores, b)
    losses = mlp.losses(logits, scores, routing.shares)
    return routing, 0.0 if losses is None else losses.item() / len(logits)


@pytest.mark.parametrize(("sizes", "wanted"), MEGATRON)
def test_the_balance_loss_is_megatrons(sizes: Any, wanted: float) -> None:
    tokens, experts, k, groups, best, score = sizes
    mlp = router(experts, k, groups, best, score, balance=(("aux_loss", 1.0),))
    assert routed(mlp, logits_of(tokens, experts), 4)[1] == pytest.approx(wanted, rel=1e-7)


def best_of(scores: Tensor, k: int) -> Tensor:
    """Return a map [T, E] of the k best scores."""
    return torch.zeros_like(scores).scatter(1, scores.topk(k, 1).indices, 1.0)


def chosen(scores: Tensor, k: int, groups: int, best: int) -> Tensor:
    """Return a map [T, E] of the experts chosen, from `best` groups where there are groups."""
    if groups > 1:
        parts = scores.view(len(scores), groups, -1)
        sums = parts.topk(k // best, 2).values.sum(2)
        open_ = best_of(sums, best).bool()[:, :, None].expand_as(parts).reshape_as(scores)
        scores = scores.masked_fill(~open_, -torch.inf)
    return best_of(scores, k)


def test_all_statistics_of_drawn_routers() -> None:
    """Three steps each of 60 routers: load, bias, dropped pairs, the z-loss, balance losses."""
    chance, limited = random.Random(3), 0
    for case in range(60):
        torch.manual_seed(case)
        groups, size = chance.choice(((0, 16), (4, 4), (2, 3), (8, 2), (4, 8)))
        experts = (groups or 1) * size
        best = chance.randint(1, groups) if groups else 0
        k = best * chance.randint(1, min(size, 4)) if groups else chance.randint(2, 6)
        score = "softmax" if k > 1 and chance.random() < 0.5 else "sigmoid"
        bias = score == "sigmoid" and chance.random() < 0.7
        kinds = chance.sample(KINDS, chance.randint(0, 3))
        balance = tuple((kind, chance.uniform(0.1, 1.0)) for kind in kinds)
        z, b, s = chance.choice((0.0, 0.1)), chance.choice((1, 2, 3)), chance.choice((5, 12))
        factor = chance.choice((None, 0.5, 1.0))
        pairs = s * b * k / experts * (factor or experts)  # an expert takes so many at most
        mlp = router(
            experts, k, groups, best, score, bias=bias, balance=balance, z=z, capacity=factor
        )
        loads, moved = mlp.ctx.sink.state_of(ExpertLoads), torch.zeros(experts).double()
        before = torch.zeros(experts, dtype=torch.float64)
        for _ in range(3):
            logits = torch.randn(s * b, experts, dtype=torch.float64) * 2
            logits[:, : experts // 3] += 1.0
            routing, loss = routed(mlp, logits, b)
            scores = logits.sigmoid() if score == "sigmoid" else logits
            plain, mine = best_of(scores, k), chosen(scores + moved, k, groups, best)
            p = scores / scores.sum(1, keepdim=True) if score == "sigmoid" else logits.softmax(1)
            want = z * logits.logsumexp(1).square().mean()
            for kind, coefficient in balance:
                if kind == "lagged_global_aux_loss":
                    each = [(before / before.sum().clamp(min=1) * p.mean(0)).sum()]
                else:
                    rows = b if kind == "seq_aux_loss" else 1
                    parts = [(plain[i::rows].mean(0) / k, p[i::rows].mean(0)) for i in range(rows)]
                    each = [(f * q).sum() for f, q in parts]
                want += coefficient * experts * sum(each) / len(each)
            assert loss == pytest.approx(float(want), rel=1e-12), (case, kinds)
            load = mine.sum(0)
            assert torch.equal(routing.load[:experts], load.long()), case

            loads.begin_step()
            y = torch.zeros(1, requires_grad=True)
            mlp.load.note(y, routing.load, torch.tensor(loss), routing.best).sum().backward()
            loads.end_step(torch.zeros(()))
            assert torch.equal(loads.counts[0], mine.sum(0)), case  # of the log
            assert loads.losses[0].item() == pytest.approx(loss), case
            assert loads.dropped[0] == (load - math.ceil(pairs)).clamp(min=0).sum(), case
            if bias:
                moved += RATE * torch.sign(mine.sum(0).mean() - mine.sum(0))
                assert torch.equal(mlp.load.e_score_correction_bias, moved), case
            if "lagged_global_aux_loss" in kinds:
                assert torch.equal(mlp.load.before, plain.sum(0)), case
            before = plain.sum(0)
            limited += not torch.equal(mine, plain)
    assert limited > 40


MASKED = BIASED | dict(moe_z_loss_coeff=0.01)
RUN = BASE | dict(lr=1e-2, clip=0.5, sp=False, moe=MASKED, masks=True)
LAYOUTS = [
    dict(dp=2, ep=2, m=2, zero=1, dispatch="alltoall", recompute="full"),
]
LONG = [
    dict(pp=2, schedule="1f1b", m=2),
    dict(cp=2, ep=2),
    dict(pp=2, schedule="zb-v", v=2, m=2, dp=2, ep=2, zero=2),
    dict(tp=2, sp=True, dp=2, ep=4, m=2, each=True, zero=2),
]


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(LONG, marks=pytest.mark.prove)], ids=["few", "many"]
)
def test_a_mask_of_the_loss_leaves_the_routers_losses(
    world: Any, layouts: list[dict[str, Any]]
) -> None:
    """--eod-mask-loss, with masks that fall unevenly on ranks and micro-batches: three steps are
    those of the twin, whose router's losses are means over all tokens.
    """
    held(world, [RUN | each for each in layouts], steps=3, within=1e-11)
