# SPDX-License-Identifier: Apache-2.0
"""On layouts drawn at random the dry run's memory and traffic are the rehearsal's.

The model is large enough that memory is not that of cuBLAS's workspaces. Float8 is not drawn: in a
pipeline whose weight gradients wait the dry run is up to 7 % above.
"""

import random
from typing import Any

import pytest

from estimate import activations, traffic
from estimate.dry_run import memory
from estimate.model_profile import make_grid
from mpu.launch import Launch
from pretrain_llama import model_provider
from training.config import UsageError
from training.flags.parse import parse

SEEDS = range(200, 205)
CHOICES = [  # each flag's values; an empty one leaves it out
    ["", "", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel",
     "--tensor-model-parallel-size 4 --sequence-parallel"],
    ["", "", "--context-parallel-size 2", "--context-parallel-size 4"],
    ["--cp-comm-type p2p", "--cp-comm-type all_gather", "--cp-comm-type a2a"],
    ["", "", "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"],
    ["", "--pipeline-schedule gpipe", "--pipeline-schedule zb-h1", "--pipeline-schedule zb-v",
     "--pipeline-schedule v-half", "--num-virtual-stages-per-pipeline-rank 2"],
    ["", "", "--decoder-first-pipeline-num-layers 1", "--decoder-last-pipeline-num-layers 1"],
    ["", "--tp-comm-overlap ring"],
    ["", "--zero-stage 1", "--zero-stage 2", "--zero-stage 3", "--zero-stage 3"],
    ["", "--overlap-grad-reduce", "--overlap-grad-reduce"],
    ["", "--overlap-param-gather", "--overlap-param-gather"],
    ["", "", "--zero-reduce-each-microbatch"],
    ["", "", "--num-distributed-optimizer-instances 2"],
    ["", "", "--grad-reduce-in-bf16"],
    ["", "", "", "--main-grads-dtype bf16"],
    ["", "", "", "--optimizer-cpu-offload"],
    ["", "", ""],
    ["", "", "--recompute-granularity selective", "--recompute-granularity full",
     "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
     "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"],
    ["", "", "--fused-linear-cross-entropy"],
    ["", "", "", "--cpu-offload-activations",
     "--cpu-offload-activations --cpu-offloading-num-layers 2"],
    ["", "--untie-embeddings-and-output-weights"],
    ["", "", "", "--wgrad-deferral-limit 2", "--defer-embedding-wgrad-compute"],
    ["--micro-batch-size 1", "--micro-batch-size 1", "--micro-batch-size 2"],
    ["--global-batch-size 16"],
    ["--num-layers 4", "--num-layers 8", "--num-layers 7"],
    ["--num-query-groups 2", "--num-query-groups 4", "--num-query-groups 1"],
    ["", "", "", "--rank-order tp-cp-pp-dp", "--rank-order dp-cp-tp-pp"],
    ["", "", "--log-params-norm"],
]  # fmt: skip
ALWAYS = ("--micro", "--global", "--num-layers", "--num-query")
MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --hidden-size 1024
    --num-attention-heads 8 --group-query-attention --ffn-hidden-size 2816 --seq-length 1024
    --max-position-embeddings 1024 --lr 1e-3 --train-iters 8 --bf16 --swiglu
""".split()


def draw(seed: int) -> tuple[int, int, list[str]]:
    """Return a world, a rank, and flags, which may exclude each other."""
    chance = random.Random(seed)
    drawn = [chance.choice(values) for values in CHOICES]
    share = chance.choice([0.4, 0.7, 1.0])  # of the flags that are kept
    drawn = [f for f in drawn if not (f and chance.random() > share and not f.startswith(ALWAYS))]
    text = " ".join(drawn)
    sizes = {name: 1 for name in ("tensor-model", "context", "pipeline-model")}
    for flag in drawn:
        for name in sizes:
            if flag.startswith(f"--{name}-parallel-size"):
                sizes[name] = int(flag.split()[1])
    without = {  # flags that begin so go, unless the text has the key
        "--context-parallel-size": ("--cp-comm",),
        "--sequence-parallel": ("--tp-comm",),
        "--zero-stage": ("--fp8-param", "--num-dist", "--optimizer-cpu"),
    }
    for needed, others in without.items():
        if needed not in text:
            drawn = [flag for flag in drawn if not flag.startswith(others)]
    if sizes["pipeline-model"] == 1:
        drawn = [flag for flag in drawn if "pipeline" not in flag and "defer" not in flag]
    if not {"--zero-stage 2", "--zero-stage 3"} & {*drawn}:
        drawn = [flag for flag in drawn if not flag.startswith("--zero-reduce")]
    world = sizes["tensor-model"] * sizes["context"] * sizes["pipeline-model"]
    world *= chance.choice([1, 2, 2, 4])
    return world, chance.randrange(world), " ".join(drawn).split()


@pytest.mark.prove
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_layout_keeps_and_sends_what_is_said(seed: int, rehearse: Any) -> None:
    world, rank, flags = draw(seed)
    words = [*MODEL, *flags]
    try:
        config = parse([*words, "--dry-run"], world)
    except UsageError as error:
        pytest.skip(f"the drawn flags exclude each other: {error}")
    grid = make_grid(config, Launch(rank, world))
    held = activations.peaks(config, model_provider)[grid.pp.rank]
    stated = sum(memory(config, model_provider, grid.pp.rank, held).values())
    rows = traffic.totals(traffic.traffic(config, model_provider, grid.pp.rank, grid))
    code, report, text = rehearse(" ".join([*words, "--rehearse-rank", str(rank)]), world, False)
    assert (code, report.get("findings")) == (0, []), text[-2000:]
    sent = dict.fromkeys(rows, 0)
    for row in report["collectives"]:
        key = row["axis"], row["verb"]
        sent[key] = sent.get(key, 0) + row["sent"]
    assert {k: n for k, n in sent.items() if n} == {k: n for k, (_, n) in rows.items() if n}
    assert stated == pytest.approx(report["memory"]["peak_bytes"], rel=0.02)
