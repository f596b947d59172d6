# SPDX-License-Identifier: Apache-2.0
"""What a rank sends in a step, worked out by hand."""

from collections import Counter
from pathlib import Path

import pytest

import pretrain_llama
from forecast import traffic
from forecast.recording import record
from tests.sampling import sampled
from tests.training.small_llama import PIPELINE, read

K = 1024
UNTIED = "--untie-embeddings-and-output-weights"


def grouped(more="", world=1, rank=0):
    """Return {(axis, verb, purpose): (times, bytes of one)} of a rank."""
    config, found = read(more, world), {}
    for row in traffic.traffic(config, pretrain_llama, rank):
        times, size = found.get((row.axis, row.verb, row.purpose), (0, row.bytes))
        found[row.axis, row.verb, row.purpose] = times + row.times, size
    return found


@pytest.mark.prove
def test_traffic_of_a_pipeline_rank():
    def rows(more, rank):
        return grouped(f"{PIPELINE} 16 --tensor-model-parallel-size 2 {more}", 8, rank)

    first, second, last = (rows("", rank) for rank in (0, 1, 3))
    forth, back = ("pp", "send", "message"), ("pp_back", "send", "message")
    assert (first[forth], first.get(back), last.get(forth)) == ((8, 32 * 2 * 64 * 4), None, None)
    assert second[forth] == second[back] == last[back] == (8, 32 * 2 * 64 * 4)
    assert first["pp_back", "receive", "message"][0] == 8
    hidden = [
        sum(r.get(("tp", "all_reduce", way), (0, 0))[0] for way in ("forward", "backward"))
        for r in (first, second, last)
    ]
    assert hidden == [72, 64, 72]
    stats = [("tp", "all_gather", "forward") in r for r in (first, last)]
    assert stats == [False, True]  # of the loss
    tied = ("embd", "all_reduce", "grad sum")
    assert first[tied] == last[tied] == (1, 16 * 64 * 4) and tied not in second
    assert tied not in rows("--untie-embeddings-and-output-weights", 0)
    assert tied not in rows("--pipeline-schedule zb-v", 0)  # one rank has both

    sp = rows("--sequence-parallel", 1)
    split = rows("--sequence-parallel --pipeline-schedule zb-h1", 1)
    assert sp[forth][1] == 32 * 2 * 64 * 4 // 2
    ways = ("forward", "backward", "wgrad")
    count = [sum(r.get(("tp", "all_gather", way), (0, 0))[0] for way in ways) for r in (sp, split)]
    assert count == [8 * 6 * 2, 8 * 8 * 2]  # a W apart from its B gathers again


def test_a_few_micro_batches_send_what_all_do():
    """Of a pipeline of two: 9 micro-batches, of which fewer are recorded."""
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1"
    config = read(f"{flags} --zero-stage 2 --global-batch-size 18", 8)
    few, every = (record(config, pretrain_llama, [1], few=count)[1] for count in (0, 9))
    assert 1 < few.few < every.few == 9
    assert traffic.totals(traffic.rows(few)) == traffic.totals(traffic.rows(every))


def test_traffic():
    found = grouped("--tensor-model-parallel-size 2 --global-batch-size 8", 4)
    # 2 micro-batches x (4 a layer x 3 layers + embedding + output layer), each s b h in fp32
    hidden = [found["tp", "all_reduce", way] for way in ("forward", "backward")]
    assert hidden == [(2 * 7, 32 * 2 * 64 * 4)] * 2
    assert found["dp_cp", "all_reduce", "grad sum"] == (1, 4 * 62 * 1024)  # embedding 10, layers 15
    sp = "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full"
    scattered = [n for (_, verb, _), (n, _) in grouped(sp, 2).items() if verb == "reduce_scatter"]
    assert sum(scattered) == 6 * 3 + 2
    assert grouped() == {}


# NCCL sums in the dtype it sends, so bf16 parts of an fp32 sum are exchanged, and added after.
# flags, ranks; of the data-parallel axis (verb, times, blocks x bytes, ranks). The 136 blocks are
# counted in test_buckets.py
SHARED = [
    (UNTIED, 4, [("all_reduce", 1, 136 * 4, 4)]),
    (
        f"{UNTIED} --grad-reduce-in-bf16",
        4,
        [("all_to_all", 1, 136 * 2, 4), ("all_gather", 1, 136 * 4, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 1",
        4,
        [("reduce_scatter", 1, 136 * 4, 4), ("all_gather", 1, 136 * 4, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 2 --bf16 --global-batch-size 16",
        4,
        [("reduce_scatter", 1, 136 * 4, 4), ("all_gather", 1, 136 * 2, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 1 --bf16 --grad-reduce-in-bf16",
        4,
        [("all_to_all", 1, 136 * 2, 4), ("all_gather", 1, 136 * 2, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 2 --bf16 --main-grads-dtype bf16",
        4,
        [("all_to_all", 1, 136 * 2, 4), ("all_gather", 1, 136 * 2, 4)],
    ),
    (
        f"{UNTIED} --zero-stage 1 --num-distributed-optimizer-instances 2 --grad-reduce-in-bf16",
        4,
        [
            ("all_to_all", 1, 136 * 2, 2),
            ("reduce_scatter", 1, 68 * 4, 2),
            ("all_gather", 1, 136 * 4 + 68 * 4, 2),
        ],
    ),
    (  # every instance is one rank: replicas
        f"{UNTIED} --zero-stage 1 --num-distributed-optimizer-instances 4",
        4,
        [("reduce_scatter", 1, 136 * 4, 4), ("all_gather", 1, 136 * 4, 4)],
    ),
    (  # norms, 8 blocks, wait for the end of the step
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 2 "
        "--zero-reduce-each-microbatch --global-batch-size 8",
        4,
        [
            ("reduce_scatter", 2, 56 * 4, 2),
            ("reduce_scatter", 1, 8 * 4, 2),
            ("all_gather", 1, 64 * 4, 2),
        ],
    ),
    (
        f"{UNTIED} --zero-stage 3 --overlap-param-gather --bf16 --global-batch-size 16",
        4,
        [
            ("reduce_scatter", 1, 136 * 4, 4),
            ("all_gather", 4, 20 * 2, 4),
            ("all_gather", 9, 32 * 2, 4),
        ],
    ),
    (  # two layers a stage
        f"{UNTIED} --zero-stage 3 --pipeline-model-parallel-size 2 --num-layers 4 "
        "--pipeline-model-parallel-layout Ett|ttL --global-batch-size 32",
        8,
        [
            ("reduce_scatter", 1, 84 * 4, 4),
            ("all_gather", 2, 32 * 4, 4),
            ("all_gather", 1, 20 * 4, 4),
        ],
    ),
    (  # norms stay whole and are gathered after the update, 8 blocks
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3",
        4,
        [
            ("reduce_scatter", 1, 66 * 4, 2),
            ("all_gather", 1, 8 * 4, 2),
            ("all_gather", 2, 10 * 4, 2),
            ("all_gather", 6, 16 * 4, 2),
        ],
    ),
]


@pytest.mark.parametrize("more,world,rows", sampled(SHARED, 3), ids=[s[0] for s in SHARED])
def test_traffic_of_data_parallel_ranks(more, world, rows):
    found, wanted = Counter(), Counter()
    for t in traffic.traffic(read(more, world), pretrain_llama):
        if t.axis.startswith("dp_cp") and t.purpose not in traffic.SMALL:
            found[t.verb, t.size] += t.times * t.bytes // K
    for verb, times, blocks, ranks in rows:
        wanted[verb, ranks] += times * blocks
    assert found == wanted


PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"
EXAMPLE = (
    "--num-layers 4 --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 --bf16 "
    "--pipeline-model-parallel-size 2 --global-batch-size 16 --overlap-grad-reduce"
)


def test_the_page_shows_what_is_worked_out():
    rows = ["| who | purpose | axis | verb | times | bytes of one | a rank sends |"]
    rows.append("|---" * 7 + "|")
    for t in traffic.traffic(read(EXAMPLE, 8), pretrain_llama):
        cells = (t.who, t.purpose, t.axis, t.verb, f"{t.times:,}", f"{t.bytes:,}", f"{t.sent:,}")
        rows.append("| " + " | ".join(cells) + " |")
    assert "\n".join(rows) in PAGE.read_text(), "\n".join(rows)
