# SPDX-License-Identifier: Apache-2.0
"""Plans of Muon: iterations, exchange and state, against the plan that a run follows."""

import numpy as np
import pytest

import pretrain_llama
from forecast.recording import record
from tools import plan
from tools.planner import matrices, own, search
from tools.planner.cluster import read_cluster
from tools.planner.model import MIXTURES, Model, read_model
from training.model_profile import grid_of

MODEL = (
    "--num-layers 4 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 "
    "--group-query-attention --num-query-groups 4 --vocab-size 4096 --seq-length 1024 "
    "--untie-embeddings-and-output-weights --swiglu"
)
ZERO = "--overlap-grad-reduce --overlap-param-gather --micro-batch-size 1 --zero-stage "
WAYS = [
    ZERO + "1 --global-batch-size 8",
    ZERO + "1 --global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel",
    ZERO + "3 --global-batch-size 8",
    "--micro-batch-size 1 --global-batch-size 8",
    "--micro-batch-size 1 --global-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel",
]


def told(model: Model, flags: str) -> tuple[search.Plans, object]:
    cluster = read_cluster("h100_8_nodes").of(1)
    config = own.config_of(model, cluster, flags)
    return search.evaluate(model, cluster, [own.layout_of(config)]), config


@pytest.mark.parametrize("flags", WAYS)
def test_a_rank_sends_what_the_plan_of_a_run_sends(flags: str) -> None:
    """The mean over ranks, to padding; the fullest owner has about as much work."""
    model = read_model(MODEL, 1024, "muon")
    plans, config = told(model, flags)
    layers = plans.runs.by_rank(plans.runs.cut).max(1)
    made = matrices.of_layer(model.flags, 0)
    sent, got = matrices.moved(made, layers, plans.runs)
    (run,) = record(config, pretrain_llama)[0].run.optimizer.plans.values()
    axis = grid_of(config, 0).instance("tp")
    first = np.mean([sum(sum(run.splits(t, me).input) for t in run.rounds) for me in range(8)])
    back = np.mean([sum(sum(run.back(t, me).output) for t in run.rounds) for me in range(8)])
    assert axis.size == 8 and len(run.matrices) == 4 * len(made)
    assert (float(sent[0]), float(got[0])) == (pytest.approx(first), pytest.approx(back))
    fullest = max(run.loads["tp"])
    costs = [m.cost for m in made] * 4
    owners = matrices.evenly(costs, 8)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == i) for i in range(8)]
    assert sum(loads) == sum(run.loads["tp"]) and max(loads) <= 1.1 * fullest <= 1.21 * max(loads)
    adam, _ = told(read_model(MODEL, 1024), flags)
    assert plans.times.update[0] > adam.times.update[0] and plans.bytes[0] < adam.bytes[0]


@pytest.mark.prove
def test_its_state_is_that_of_the_dry_run() -> None:
    for name in ("muon", "adam"):
        flags = ZERO + "1 --global-batch-size 8 --tensor-model-parallel-size 4 --sequence-parallel"
        plans, _ = told(read_model("8B", 8192, name), flags)
        assert plans.bytes[0] == pytest.approx(plans.exact(0), rel=0.01)


@pytest.mark.prove
def test_experts_are_matrices_of_their_own() -> None:
    model = read_model("mixtral-8x7b", 4096, "muon")
    made = matrices.of_layer(model.flags, 1)
    experts = MIXTURES["MIXTRAL-8X7B"][1][0]
    assert sum(m.rows * m.columns == 4096 * 14336 for m in made) == 3 * experts
    plans, _ = told(model, ZERO + "1 --global-batch-size 8 --expert-model-parallel-size 8")
    assert plans.times.update[0] > 0


@pytest.mark.prove
def test_the_command_line_and_why_know_the_optimizer(capsys) -> None:
    argv = [MODEL, "h100_8_nodes", "--nodes", "1", "--global-batch-size", "16", "--top", "1"]
    assert plan.main([*argv, "--optimizer", "muon"]) == 0
    assert "--optimizer muon" in capsys.readouterr().out
    why = f"{WAYS[0].replace('size 8', 'size 16')} --optimizer muon --muon-num-ns-steps 9"
    assert plan.main([*argv[:4], "--seq-length", "1024", "--why", why]) == 0
    assert "compute" in capsys.readouterr().out
    named = own.with_optimizer(read_model(MODEL, 1024), why).config.optimizer
    assert (named.optimizer, named.muon_num_ns_steps) == ("muon", 9)
    assert plan.main([*argv, "--why", f"{WAYS[0]} --optimizer-state-offload"]) == 0
    assert "not counted" not in capsys.readouterr().out
