# SPDX-License-Identifier: Apache-2.0
"""Plans of 8 to 16,384 GPUs are rehearsed as they stand: nothing found, memory within 2 %.

Of random layouts the bytes of each collective are the rehearsal's, FLOPs and memory within 2 %.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import pretrain_llama
from forecast.planner.cluster import read_cluster
from forecast.planner.model import REST
from forecast.planner.search import Plans
from forecast.traffic import traffic
from tests.forecast.rehearsal.conftest import Process
from tools import plan
from training.flags.parse import parse

Report = dict[str, Any]
Rehearse = Callable[[Plans, int, int], Report]
PLANS = [  # model, cluster, nodes, sequence, sequences of a step
    ("1B", "h100_8_nodes", 1, 2048, 64), ("8B", "h100_8_nodes", 1, 8192, 32),
    ("8B", "a100_16_nodes", 2, 4096, 64), ("8B", "h100_8_nodes", 8, 32768, 64),
    ("70B", "h100_8_nodes", 8, 8192, 128), ("70B", "a100_16_nodes", 16, 4096, 256),
    ("70B", "h100_128_nodes", 32, 8192, 512), ("405B", "h100_128_nodes", 64, 8192, 512),
    ("405B", "h100_128_nodes", 128, 8192, 1024), ("405B", "h100_128_nodes", 2048, 8192, 16384),
]  # fmt: skip
EIGHT = (  # layers of 8B's size
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --vocab-size 32000 "
    "--untie-embeddings-and-output-weights"
)


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
    rest = REST.replace("--bf16 ", "").replace("--train-iters 1", "--train-iters 8")
    return [*plans.recorded(n).command.split(), *rest.split()]


def hold_memory(plans: Plans, n: int, stage: int, report: Report) -> None:
    """Hold a rank's memory to the rehearsal's."""
    ratio = sum(plans.recorded(n).ranks[stage].kinds.values()) / report["memory"]["peak_bytes"]
    assert ratio == pytest.approx(1, abs=0.02), plans.layouts[n]


def hold_bytes(plans: Plans, n: int, stage: int, report: Report) -> None:
    """Hold what the planner says that a rank sends, by axis and verb, to what it sent."""
    told, sent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row in traffic(parse(words(plans, n), plans.cluster.gpus), pretrain_llama, stage):
        told[row.axis, row.verb] += row.sent
    for row in report["collectives"]:
        sent[row["axis"], row["verb"]] += row["sent"]
    assert told == sent, plans.layouts[n]


def hold_flops(plans: Plans, n: int, stage: int, report: Report) -> None:
    """Hold matmuls and attention to 2 and 4 a weight, forward and backward, and what runs again."""
    e, m = plans.layouts[n], plans.model.config.model
    assert m.vocab_size is not None
    parts = {True: 0.0, False: 0.0}
    for row in report["launches"]:
        parts[row["part"] == "attention"] += row["flops"]
    cut = [int(layers) for layers in plans.runs.cut[n][: e.pp * e.virtual]]
    own = [k for k in range(len(cut)) if rank_of(k, e.pp, e.v_shape) == stage]
    layers, whole = sum(cut[k] for k in own), e.recompute == "full"
    again = layers if whole else sum(min(e.again, cut[k]) for k in own)
    vocab = -(-m.vocab_size // (128 * e.tp)) * 128
    tokens = e.micro_batches * e.micro_batch * m.seq_length / e.cp
    weights = float(plans.runs.layer_weights[n]) / e.tp
    matmuls = (6 * layers + 2 * again) * weights + 6 * vocab * m.hidden_size * (len(cut) - 1 in own)
    assert parts[False] == pytest.approx(matmuls * tokens, rel=0.02), e
    cores = 3.5 * layers + (layers if e.recompute == "selective" else again)
    score = 2 * m.seq_length * m.hidden_size / e.tp  # q k and its use, causal: half of all pairs
    assert parts[True] == pytest.approx(cores * score * tokens, rel=0.02), e


def rank_of(k: int, pp: int, v_shape: bool) -> int:
    """Return the pipeline rank of a stage."""
    chunk, place = divmod(k, pp)
    return pp - 1 - place if v_shape and chunk % 2 else place


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


@pytest.mark.prove
@pytest.mark.parametrize("draw", range(20))
def test_random_layouts_are_the_rehearsals(draw: int, rehearse: Rehearse) -> None:
    """The first rank of every second layout, the last rank of the others."""
    asked: plan.Question = {"seq-length": 2048, "global-batch-size": 32}
    plans = plan.plans_of(EIGHT, read_cluster("h100_8_nodes").of(1 + draw % 2), asked)
    n = random.Random(draw).randrange(len(plans.layouts))
    last = draw // 2 % 2
    rank, stage = (plans.cluster.gpus - 1, plans.layouts[n].pp - 1) if last else (0, 0)
    report = rehearse(plans, n, rank)
    for hold in (hold_bytes, hold_flops, hold_memory):
        hold(plans, n, stage, report)
