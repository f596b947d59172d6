# SPDX-License-Identifier: Apache-2.0
"""Plans of 8 to 16,384 GPUs are rehearsed as they stand: nothing found, memory within 2 %."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import plan
from tools.planner.cluster import read_cluster
from tools.planner.model import REST
from tools.planner.search import Plans

ROOT = Path(__file__).resolve().parents[3]
PLANS = [  # model, cluster, nodes, sequence, sequences of a step
    ("1B", "h100_8_nodes", 1, 2048, 64), ("8B", "h100_8_nodes", 1, 8192, 32),
    ("8B", "a100_16_nodes", 2, 4096, 64), ("8B", "h100_8_nodes", 8, 32768, 64),
    ("70B", "h100_8_nodes", 8, 8192, 128), ("70B", "a100_16_nodes", 16, 4096, 256),
    ("70B", "h100_128_nodes", 32, 8192, 512), ("405B", "h100_128_nodes", 64, 8192, 512),
    ("405B", "h100_128_nodes", 128, 8192, 1024), ("405B", "h100_128_nodes", 2048, 8192, 16384),
]  # fmt: skip
SMALL = (
    "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --vocab-size 32000 "
    "--untie-embeddings-and-output-weights"
)


def rehearsed(folder: Path, command: str, world: int, rank: int) -> dict[str, Any]:
    """Return what a rehearsal of a rank reports; it must find nothing."""
    file = folder / f"{rank}.json"
    rest = REST.replace("--bf16 ", "").replace("--train-iters 1", "--train-iters 8").split()
    argv = [*command.split(), *rest, "--rehearse", "--rehearse-rank", str(rank)]
    done = subprocess.run(
        [sys.executable, "pretrain_llama.py", *argv, "--rehearse-json", str(file)],
        cwd=ROOT, env=os.environ | {"WORLD_SIZE": str(world)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def hold(plans: Plans, n: int, folder: Path) -> None:
    """Hold the memory of a plan's first and last rank to the rehearsal's."""
    world, each = plans.cluster.gpus, plans.layouts[n]
    assert plans.exact(n) > 0
    for rank, stage in ((0, 0), (world - 1, each.pp - 1)):
        peak = rehearsed(folder, plans.command(n), world, rank)["memory"]["peak_bytes"]
        assert plans.known[n][stage] == pytest.approx(peak, rel=0.02), (each, rank)


@pytest.mark.prove
@pytest.mark.parametrize(("model", "cluster", "nodes", "sequence", "batch"), PLANS)
def test_the_best_plan_is_rehearsed(
    model: str, cluster: str, nodes: int, sequence: int, batch: int, tmp_path: Path
) -> None:
    asked: plan.Asked = {"seq-length": sequence, "global-batch-size": batch}
    plans = plan.plans_of(model, read_cluster(cluster).of(nodes), asked)
    hold(plans, plans.best(1)[0], tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("draw", range(50))
def test_random_layouts_are_the_rehearsals(draw: int, tmp_path: Path) -> None:
    asked: plan.Asked = {"seq-length": 2048, "global-batch-size": 32}
    plans = plan.plans_of(SMALL, read_cluster("h100_8_nodes").of(1 + draw % 2), asked)
    hold(plans, random.Random(draw).randrange(len(plans.layouts)), tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_steps_flops_are_the_rehearsals(tp: int, tmp_path: Path) -> None:
    asked: plan.Asked = {"seq-length": 2048, "global-batch-size": 8}
    plans = plan.plans_of(SMALL, read_cluster("h100_8_nodes").of(1), asked)
    each = next(
        n for n, e in enumerate(plans.layouts)
        if (e.tp, e.cp, e.pp, e.recompute, e.offload) == (tp, 1, 1, "none", False)
    )  # fmt: skip
    launches = rehearsed(tmp_path, plans.command(each), 8, 0)["launches"]
    parts = {True: 0.0, False: 0.0}
    for row in launches:
        parts[row["part"] == "attention"] += row["flops"]
    r = plans.runs
    told = float((r.flops * r.tokens / r.gpus)[each])
    matmuls = 6 * (8 * r.layer_weights[each] + 32000 * 512) * float(r.tokens[each]) / 8
    assert parts[False] == pytest.approx(matmuls, rel=0.02)
    # attention's backward multiplies five times where the model's count has four
    assert sum(parts.values()) == pytest.approx(told, rel=0.15)
