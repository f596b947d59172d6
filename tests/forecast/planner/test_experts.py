# SPDX-License-Identifier: Apache-2.0
"""Plans of mixtures of experts: the search, its memory and FLOPs, and what is published."""

import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import pretrain_llama
from benchmarks.planning import experts
from benchmarks.planning.foreign_runs import ForeignRuns, stacked
from forecast import dry_run
from forecast.planner import search
from forecast.planner.cluster import read_cluster
from forecast.planner.constants import WEFT
from forecast.planner.layout import eps
from forecast.planner.model import MIXTURES, Model, read_model
from forecast.planner.step_time import layer, times
from forecast.recording import record
from pretrain_llama import model_provider
from training.run.model_profile import model_profile

SMALL = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --vocab-size 32000 --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 1536 --untie-embeddings-and-output-weights"
)


@pytest.fixture(scope="module")
def model() -> Model:
    return read_model(SMALL, 2048)


@pytest.fixture(scope="module")
def plans(model: Model) -> search.Plans:
    return search.plan(model, read_cluster("h100_8_nodes").of(1), 32)


def test_the_ranks_that_hold_the_same_experts() -> None:
    """edp of a stage of tp 2, cp 3, dp 4 by ep 6, and by ep 1."""
    names = [field.name for field in fields(ForeignRuns) if field.name != "cut"]
    record: dict[str, Any] = dict.fromkeys(names, 1) | {"tp": 2, "cp": 3, "dp": 4, "cut": [1]}
    found = stacked([record | {"ep": ep} for ep in (6, 1)])
    assert found.edp.tolist() == [4, 24]


@pytest.mark.prove
def test_every_ep_that_divides_is_searched(model: Model, plans: search.Plans) -> None:
    assert {each.ep for each in plans.layouts} == {1, 2, 4, 8}
    assert any(each.overlap_ep for each in plans.layouts)
    assert eps(model, 6) == [1, 2]
    assert eps(read_model("8B", 2048), 8) == [0]
    for n in random.Random(1).sample(range(len(plans.layouts)), 40):
        each, p = plans.layouts[n], plans.recorded(n).config
        assert p.expert_model_parallel_size == each.ep
        assert p.parallel.overlap_moe_expert_parallel_comm == each.overlap_ep


@pytest.mark.prove
def test_a_plan_has_the_bytes_of_the_dry_run_to_a_few_percent(plans: search.Plans) -> None:
    """Where W follows B and nothing is offloaded; the rows of a plan have the dry run's own."""
    near = [n for n, each in enumerate(plans.layouts)
            if not (each.split or each.offload) and each.zero <= 1]  # fmt: skip
    some = random.Random(3).sample(near, 12)
    far = [abs(float(plans.bytes[n]) / plans.recorded(n).bytes - 1) for n in some]
    assert np.median(far) < 0.04 and max(far) < 0.15, far


@pytest.mark.prove
@pytest.mark.parametrize(
    ("pp", "virtual", "recompute"),
    [(1, 1, "none"), (2, 1, "full"), (2, 2, "none")],
)
def test_a_forward_during_a_backward_hides_some_of_the_exchanges(
    model: Model, pp: int, virtual: int, recompute: str
) -> None:
    """It takes the dry run's memory, and no less time than all exchanges hidden would."""
    cluster, name = read_cluster("h100_8_nodes").of(1), "interleaved" if virtual > 1 else "1f1b"
    plain = search.Layout(
        tp=1, pp=pp, virtual=virtual, dp=8 // pp, micro_batch=1, micro_batches=8, zero=1, ep=4,
        recompute=recompute, schedule=name, dispatcher="alltoall",
    )  # fmt: skip
    assert plain.can_overlap_ep and not replace(plain, ep=1).can_overlap_ep
    plans = search.evaluate(model, cluster, [plain, replace(plain, overlap_ep=True)])
    constants, runs = search._constants(cluster), plans.runs
    exchanges = layer(constants, runs).exchanges * 8 * 8 / pp  # layers of a rank, micro-batches
    assert 0 < exchanges[1] < exchanges[0]
    assert 0 < plans.times.step[0] - plans.times.step[1] < exchanges[0]
    alone, overlapped = plans.recorded(0), plans.recorded(1)
    recordings = record(overlapped.config, pretrain_llama)
    told = [dry_run.memory(overlapped.config, recordings[rank]) for rank in range(pp)]
    assert [rank.kinds for rank in overlapped.ranks] == told and overlapped.bytes > alone.bytes
    assert plans.bytes[1] == pytest.approx(overlapped.bytes, rel=0.1)


@pytest.mark.prove
@pytest.mark.parametrize("name", list(MIXTURES))
def test_flops_of_a_token_are_those_of_the_model(name: str) -> None:
    model = read_model(name, 4096)
    layout = search.Layout(
        tp=1, pp=1, virtual=1, dp=8, micro_batch=1, micro_batches=1, zero=1, recompute="none", ep=8
    )
    runs = search.runs_of(model, read_cluster("h100_8_nodes").of(1), [layout])
    own = model_profile(model.config, model_provider)
    foreign = ForeignRuns(**vars(runs), causal=np.ones(1), idle=np.zeros(1))
    assert float(foreign.flops[0]) == pytest.approx(own.flops, rel=2e-3)
    weights = runs.layers * (runs.layer_weights + runs.experts * runs.expert_weights)
    weights = weights + (2 - runs.tied) * runs.vocab * runs.hidden
    assert float(weights[0]) == pytest.approx(own.parameters, rel=2e-3)


@pytest.mark.prove
def test_skew_and_dispatch_slow_a_step_where_experts_are_dealt_out(plans: search.Plans) -> None:
    c = search._constants(plans.cluster)
    plain = c | {"expert_skew": 1.0, "dispatch": 1.0}
    before = times(plain, plans.runs).step
    for name in ("expert_skew", "dispatch"):
        more = times(plain | {name: 2.0}, plans.runs).step
        dealt = plans.runs.ep > 1
        free = plans.runs.offload == 0  # else copies may hide it
        assert (more[~dealt] == before[~dealt]).all()
        slower = more[dealt & free] / before[dealt & free]
        assert np.mean(slower > 1) > 0.95 and np.median(slower) > 1.02


@pytest.mark.prove
def test_the_constants_are_those_of_the_published_runs() -> None:
    """Half of the runs are fitted, the others told: docs/predictions.md has the table."""
    found = experts.fitted(experts.ROWS)
    for name in ("dispatch", "expert_skew"):
        assert found[name] == pytest.approx(WEFT[name], rel=0.02)
    rows = [row for row in experts.ROWS if row.part == "test"]
    off = [abs(told / row.tflops - 1)
           for told, row in zip(experts.told(rows, found), rows, strict=True)]  # fmt: skip
    assert np.median(off) < 0.15


def test_experts_are_not_planned_in_float8_nor_among_dense_layers(model: Model) -> None:
    with pytest.raises(search.PlanError, match="experts multiply in bf16 only, not in tensorwise"):
        search.plan(model, read_cluster("h100_8_nodes").of(1), 32, "tensorwise")
    with pytest.raises(ValueError, match="it has both dense layers and layers with experts"):
        read_model(f"{SMALL} --moe-layer-freq 2", 2048)
