# SPDX-License-Identifier: Apache-2.0
"""What a rank sends in a step, worked out by hand."""

import pytest

from estimate import traffic
from pretrain_llama import model_provider
from tests.training.small_llama import PIPELINE, read
from tools.explainer.formulas import apply, read_formulas

K = 1024
UNTIED = "--untie-embeddings-and-output-weights"


def test_traffic_of_a_pipeline_rank():
    def rows(more, rank):
        config = read(f"{PIPELINE} 16 --tensor-model-parallel-size 2 {more}", 8)
        return {(t.axis, t.verb): t for t in traffic.traffic(config, model_provider, rank)}

    first, second, last = (rows("", rank) for rank in (0, 1, 3))
    assert [r["pp", "send"].times for r in (first, second, last)] == [8, 16, 8]
    assert second["pp", "send"].sent == 16 * 32 * 2 * 64 * 4
    assert [r["tp", "all-reduce"].times for r in (first, second, last)] == [72, 64, 72]
    assert ("tp", "all-gather") in last and ("tp", "all-gather") not in first  # of the loss
    assert first["pp", "all-reduce"].bytes == last["pp", "all-reduce"].bytes == 16 * 64 * 4
    assert ("pp", "all-reduce") not in second
    assert ("pp", "all-reduce") not in rows("--untie-embeddings-and-output-weights", 0)
    assert ("pp", "all-reduce") not in rows("--pipeline-schedule zb-v", 0)  # one rank has both

    sp = rows("--sequence-parallel", 1)
    assert sp["pp", "send"].bytes == 32 * 2 * 64 * 4 // 2
    assert sp["tp", "all-gather"].times == 8 * 6 * 2
    assert rows("--sequence-parallel --pipeline-schedule zb-h1", 1)["tp", "all-gather"].times == (
        8 * 8 * 2  # a W apart from its B gathers again
    )


def test_traffic():
    config = read("--tensor-model-parallel-size 2 --global-batch-size 8", 4)
    by = {(t.axis, t.verb): t for t in traffic.traffic(config, model_provider)}
    # 2 micro-batches x (4 a layer x 3 layers + embedding + output layer), each s b h in fp32
    assert by["tp", "all-reduce"].times == 2 * 14
    assert by["tp", "all-reduce"].bytes == 32 * 2 * 64 * 4
    assert by["tp", "all-reduce"].sent == 28 * 32 * 2 * 64 * 4
    assert by["dp", "all-reduce"].bytes == 4 * 62 * 1024  # embedding 10, layers 15, norms 1 each
    sp = read("--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full", 2)
    rows = [t for t in traffic.traffic(sp, model_provider) if t.verb == "reduce-scatter"]
    assert [t.times for t in rows] == [6 * 3 + 2]
    assert traffic.traffic(read(), model_provider) == []


# flags, ranks; of the data-parallel axis (verb, times, blocks x bytes, ranks). The 136 blocks are
# counted in test_rank_memory.py
SHARED = [
    (UNTIED, 4, [("all-reduce", 1, 136 * 4, 4)]),
    (
        f"{UNTIED} --grad-reduce-in-bf16",
        4,
        [("reduce-scatter", 1, 136 * 2, 4), ("all-gather", 1, 136 * 4, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 1",
        4,
        [("reduce-scatter", 1, 136 * 4, 4), ("all-gather", 1, 136 * 4, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 2 --bf16 --global-batch-size 16",
        4,
        [("reduce-scatter", 1, 136 * 4, 4), ("all-gather", 1, 136 * 2, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 1 --bf16 --grad-reduce-in-bf16",
        4,
        [("reduce-scatter", 1, 136 * 2, 4), ("all-gather", 1, 136 * 2, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 2 --bf16 --main-grads-dtype bf16",
        4,
        [("reduce-scatter", 1, 136 * 2, 4), ("all-gather", 1, 136 * 2, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 1 --num-distributed-optimizer-instances 2 --grad-reduce-in-bf16",
        4,
        [
            ("reduce-scatter", 1, 136 * 2, 2),
            ("all-reduce", 1, 68 * 4, 2),
            ("all-gather", 1, 136 * 4, 2),
        ],
    ),
    (  # every instance is one rank: replicas
        f"{UNTIED} --zero-stage 1 --num-distributed-optimizer-instances 4",
        4,
        [("all-reduce", 1, 136 * 4, 4)],
    ),
    (  # norms, 8 blocks, wait for the end of the step
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 2 "
        "--zero-reduce-each-microbatch --global-batch-size 8",
        4,
        [
            ("reduce-scatter", 2, 56 * 4, 2),
            ("reduce-scatter", 1, 8 * 4, 2),
            ("all-gather", 1, 64 * 4, 2),
        ],
    ),
    (
        f"{UNTIED} --zero-stage 3 --overlap-param-gather --bf16 --global-batch-size 16",
        4,
        [
            ("reduce-scatter", 1, 136 * 4, 4),
            ("all-gather", 4, 20 * 2, 4),
            ("all-gather", 9, 32 * 2, 4),
        ],
    ),
    (  # two layers a stage
        f"{UNTIED} --zero-stage 3 --pipeline-model-parallel-size 2 --num-layers 4 "
        "--pipeline-model-parallel-layout Ett|ttL --global-batch-size 32",
        8,
        [
            ("reduce-scatter", 1, 84 * 4, 4),
            ("all-gather", 2, 32 * 4, 4),
            ("all-gather", 1, 20 * 4, 4),
        ],
    ),
    (  # norms stay whole and are gathered after the update, 8 blocks
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3",
        4,
        [
            ("reduce-scatter", 1, 66 * 4, 2),
            ("all-gather", 1, 8 * 4, 2),
            ("all-gather", 2, 10 * 4, 2),
            ("all-gather", 6, 16 * 4, 2),
        ],
    ),
]


@pytest.mark.parametrize("more,world,rows", SHARED, ids=[s[0] for s in SHARED])
def test_traffic_of_data_parallel_ranks(more, world, rows):
    found = [t for t in traffic.traffic(read(more, world), model_provider) if t.axis == "dp"]
    assert sorted((t.verb, t.times, t.bytes // K, t.size) for t in found) == sorted(rows)


def test_a_ring_sends_all_but_its_own_part():
    assert traffic.Traffic("dp", "reduce-scatter", 3, 400, 4).sent == 900
    assert traffic.Traffic("dp", "all-reduce", 1, 400, 4).sent == 600


def test_the_amaxes_of_delayed_scales_are_as_explain_counts_them():
    """explain's own test compares its document with what a step sends."""
    more = "--bf16 --fp8-format hybrid --fp8-recipe delayed --pipeline-model-parallel-size 2 "
    more += "--tensor-model-parallel-size 2 --context-parallel-size 2 --num-layers 5 "
    more += "--pipeline-model-parallel-layout Etttt|tL --first-last-layers-bf16 "
    config, formulas = read(more + "--global-batch-size 4", 16), read_formulas()
    for rank, layers in enumerate([3, 0]):
        applied = [a for a in apply(config, formulas, rank) if a.row.what.startswith("amaxes")]
        wanted = [({"dp_cp": "dp"}.get(a.row.axis, a.row.axis), a.count, a.sent) for a in applied]
        rows = [t for t in traffic.traffic(config, model_provider, rank) if t.bytes == 12 * layers]
        assert [(t.axis, t.times, t.sent) for t in rows] == wanted
        assert [t.sent for t in rows] == ([12 * 3, 12 * 3 * 3 // 2] if layers else [])
