# SPDX-License-Identifier: Apache-2.0
"""Plans of Muon: its state, and the command line."""

import pytest

from forecast.planner import own, search
from forecast.planner.cluster import read_cluster
from forecast.planner.layout import Layout
from forecast.planner.model import read_model
from tools import plan

MODEL = (
    "--num-layers 4 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 "
    "--group-query-attention --num-query-groups 4 --vocab-size 4096 --seq-length 1024 "
    "--untie-embeddings-and-output-weights --swiglu"
)
ZERO = "--overlap-grad-reduce --overlap-param-gather --micro-batch-size 1 --zero-stage "
CLUSTER = read_cluster("8xh100")


@pytest.mark.prove
def test_its_state_is_that_of_the_dry_run() -> None:
    for name in ("muon", "adam"):
        layout = Layout(tp=4, pp=1, virtual=1, dp=2, micro_batch=1, micro_batches=4, zero=1,
                        recompute="none")  # fmt: skip
        plans = search.evaluate(read_model("8B", 8192, name), CLUSTER, [layout])
        assert plans.bytes[0] == pytest.approx(plans.recorded(0).bytes, rel=0.01)


@pytest.mark.prove
def test_the_command_line_and_why_know_the_optimizer(capsys) -> None:
    argv = [MODEL, "h100_8_nodes", "--nodes", "1", "--global-batch-size", "16", "--top", "1"]
    assert plan.main([*argv, "--optimizer", "muon"]) == 0
    assert "--optimizer muon" in capsys.readouterr().out
    why = ZERO + "1 --global-batch-size 16 --optimizer muon --muon-num-ns-steps 9"
    assert plan.main([*argv[:4], "--seq-length", "1024", "--why", why]) == 0
    assert "compute" in capsys.readouterr().out
    named = own.with_optimizer(read_model(MODEL, 1024), why).config.optimizer
    assert (named.optimizer, named.muon_num_ns_steps) == ("muon", 9)
