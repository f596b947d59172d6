# SPDX-License-Identifier: Apache-2.0
"""Plans of 8 to 512 GPUs are rehearsed as they stand: nothing found, memory within 2 %."""

from collections.abc import Callable
from typing import Any

import pytest

from forecast.planner.cluster import read_cluster
from forecast.planner.model import REST
from forecast.planner.search import Plans
from tests.forecast.rehearsal.conftest import Process
from tools import plan

Report = dict[str, Any]
Rehearse = Callable[[Plans, int, int], Report]
PLANS = [  # model, cluster, nodes, sequence, sequences of a step
    ("1B", "h100_8_nodes", 1, 2048, 64), ("8B", "h100_8_nodes", 1, 8192, 32),
    ("8B", "a100_16_nodes", 2, 4096, 64), ("70B", "h100_8_nodes", 8, 8192, 128),
    ("405B", "h100_128_nodes", 64, 8192, 512),
]  # fmt: skip


@pytest.fixture(scope="module")
def rehearse(rehearser: Process) -> Rehearse:
    """Return what a rehearsal of a layout's rank reports; it must find nothing."""

    def run(plans: Plans, n: int, rank: int) -> Report:
        argv = [*words(plans, n), "--rehearse-rank", str(rank)]
        found = rehearser.rehearse(argv, plans.cluster.gpus)
        assert (found.code, found.report.get("findings")) == (0, []), found.text[-2000:]
        return found.report

    return run


def words(plans: Plans, n: int) -> list[str]:
    """Return the command line of a layout."""
    rest = REST.replace("--bf16 ", "")
    return [*plans.recorded(n).command.split(), *rest.split()]


def hold_memory(plans: Plans, n: int, stage: int, report: Report) -> None:
    """Hold a rank's memory to the rehearsal's."""
    ratio = sum(plans.recorded(n).ranks[stage].kinds.values()) / report["memory"]["peak_bytes"]
    assert ratio == pytest.approx(1, abs=0.02), plans.layouts[n]


@pytest.mark.prove
@pytest.mark.parametrize(("model", "cluster", "nodes", "sequence", "batch"), PLANS)
def test_the_best_plan_is_rehearsed(
    model: str, cluster: str, nodes: int, sequence: int, batch: int, rehearse: Rehearse
) -> None:
    asked: plan.Question = {"seq-length": sequence, "global-batch-size": batch}
    plans = plan.plans_of(model, read_cluster(cluster).of(nodes), asked)
    (best,), world = plans.chosen(1), plans.cluster.gpus
    n = next(n for n, each in enumerate(plans.layouts) if each.flags() == best.flags)
    for rank, stage in ((0, 0), (world - 1, plans.layouts[n].pp - 1)):
        hold_memory(plans, n, stage, rehearse(plans, n, rank))
