# SPDX-License-Identifier: Apache-2.0
"""Draw layouts at random, from every flag that changes a step: (world, rank, flags)."""

import random

CHOICES = [  # each flag's values; an empty one leaves it out, a space in front makes that likely
    ["", "", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel",
     "--tensor-model-parallel-size 4 --sequence-parallel"],
    ["", "", "", "--context-parallel-size 2"],
    ["--cp-comm-type p2p", "--cp-comm-type all_gather", "--cp-comm-type a2a"],
    ["", "", "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"],
    ["", "--pipeline-schedule gpipe", "--pipeline-schedule zb-h1", "--pipeline-schedule zb-v",
     "--pipeline-schedule v-half", "--num-virtual-stages-per-pipeline-rank 2"],
    ["", "--tp-comm-overlap ring"],
    ["", "--zero-stage 1", "--zero-stage 2", "--zero-stage 3"],
    ["", "--overlap-grad-reduce"],
    ["", "--overlap-param-gather"],
    ["", "", "--zero-reduce-each-microbatch"],
    ["", "", "", "--num-distributed-optimizer-instances 2"],
    ["", "", "--grad-reduce-in-bf16"],
    ["", "", "", "--main-grads-dtype bf16"],
    ["", "", "", "--optimizer-cpu-offload", "--optimizer-backend triton",
     "--optimizer-state-offload"],
    ["", "", "--recompute-granularity selective", "--recompute-granularity full",
     "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
     "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"],
    ["", "", "--fused-linear-cross-entropy"],
    ["", "", "", "--cpu-offload-activations"],
    ["", "", "--reset-position-ids --reset-attention-mask --eod-mask-loss", "--eod-mask-loss",
     "--reset-position-ids"],
    ["", "--untie-embeddings-and-output-weights"],
    ["", "", "--wgrad-deferral-limit 2", "--defer-embedding-wgrad-compute"],
    ["", "", "", "", "--cuda-graph"],
    ["", "", "", "--fp8-format hybrid --fp8-recipe tensorwise",
     "--fp8-format e4m3 --fp8-recipe rowwise", "--fp8-format e4m3 --fp8-recipe blockwise"],
    ["", "", "--fp8-wgrad-bf16", "--fp8-param-gather", "--first-last-layers-bf16"],
    ["", "", "--clip-grad 0", "--clip-grad 0.3"],
    ["", "", "--decoupled-lr 1e-4"],
    ["", "--use-rope-scaling"],
    ["--micro-batch-size 1", "--micro-batch-size 2"],
    ["--global-batch-size 8", "--global-batch-size 16"],
    ["--num-layers 4", "--num-layers 8"],
    ["--num-query-groups 2", "--num-query-groups 4", "--num-query-groups 1"],
    ["", "", "", "--rank-order pp-dp-tp-cp", "--rank-order dp-cp-tp-pp"],
    ["", "", "--log-params-norm"],
    ["", "", "--on-spike report"],
    ["", "", "--empty-unused-memory-level 1"],
    ["", "", "--rehearse-device a100", "--rehearse-device b200"],
    ["", "", "", "--rehearse-full"],
    ["", "", "--manual-gc"],
]  # fmt: skip
MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --hidden-size 256
    --num-attention-heads 4 --group-query-attention --ffn-hidden-size 512 --seq-length 128
    --max-position-embeddings 128 --lr 1e-3 --train-iters 8 --bf16 --ddp-bucket-size 65536
""".split()


def draw(seed: int, count: int) -> list[tuple[int, int, str]]:
    """Return so many layouts: the world, a rank, the flags. Some are refused: flags exclude."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        flags = [chance.choice(values) for values in CHOICES]
        parts = 1
        for flag in flags:
            name, _, value = flag.partition("-parallel-size ")
            parts *= int(value.split()[0]) if value else 1
        if "--cp-comm-type" in " ".join(flags) and "--context-parallel-size 2" not in flags:
            flags = [flag for flag in flags if not flag.startswith("--cp-comm-type")]
        if "--pipeline-model" not in " ".join(flags):
            flags = [f for f in flags if "pipeline" not in f and "defer" not in f]
        else:
            flags = [flag for flag in flags if flag != "--cuda-graph"]
        if "--sequence-parallel" not in " ".join(flags):
            flags = [flag for flag in flags if not flag.startswith("--tp-comm")]
        if "--zero-stage" not in " ".join(flags):
            flags = [f for f in flags if not f.startswith(("--fp8-param", "--num-dist"))]
        if not {"--zero-stage 2", "--zero-stage 3"} & {*flags}:
            flags = [flag for flag in flags if not flag.startswith("--zero-reduce")]
        if "--fp8-format" not in " ".join(flags):
            flags = [flag for flag in flags if not flag.startswith(("--fp8", "--first-last"))]
        world = parts * chance.choice([1, 2, 2])
        rank = chance.randrange(world)
        found.append((world, rank, " ".join(flag for flag in flags if flag)))
    return found
