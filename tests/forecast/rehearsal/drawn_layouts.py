# SPDX-License-Identifier: Apache-2.0
"""Draw layouts at random, from every flag that changes a step: (world, rank, flags).

    draw       layouts of a seed; some are refused, as their flags exclude each other
    accepted   the first layout of a seed that no rule refuses
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import pretrain_llama
from training.flags.parse import parse
from training.run import matrices
from training.settings.config import UsageError

TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
FULL = "--recompute-granularity full"
EXPERTS = "--num-experts 8 --expert-tensor-parallel-size 1 --moe-router-topk"
TO, EP = "--moe-token-dispatcher-type", "--expert-model-parallel-size"
MUON = "--optimizer muon"
BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise"
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8 --rehearse-device b200"
CHOICES = [  # each flag's values; an empty one leaves it out
    ["", "", f"{TP} 2", f"{TP} 2 --sequence-parallel", f"{TP} 4 --sequence-parallel"],
    ["", "", "", f"{CP} 2", f"{CP} 2", f"{CP} 4"],
    ["--cp-comm-type p2p", "--cp-comm-type all_gather", "--cp-comm-type a2a"],
    ["", "", f"{PP} 2", f"{PP} 2", f"{PP} 4"],
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
    ["", "", "", "--optimizer-cpu-offload",
     "--optimizer-state-offload", "--optimizer-state-offload"],
    ["", "", "", MUON, MUON + " --muon-no-split-qkv", MUON + " --muon-fp32-matmul-prec high"],
    ["", "", "--recompute-granularity selective", FULL,
     f"{FULL} --recompute-method block --recompute-num-layers 1",
     f"{FULL} --recompute-method uniform --recompute-num-layers 2"],
    ["", "", "--fused-linear-cross-entropy"],
    ["", "", "", "--cpu-offload-activations",
     "--cpu-offload-activations"],
    ["", "", "--reset-position-ids --reset-attention-mask --eod-mask-loss", "--eod-mask-loss",
     "--reset-position-ids"],
    ["", "--untie-embeddings-and-output-weights"],
    ["", "", "", "--defer-embedding-wgrad-compute", "--defer-embedding-wgrad-compute"],
    ["", "", "", f"{EXPERTS} 2 {TO} alltoall", f"{EXPERTS} 1 --moe-router-pre-softmax {TO} auto",
     f"{EXPERTS} 2 {TO} allgather --moe-shared-expert-intermediate-size 512",
     f"{EXPERTS} 4 {TO} alltoall --moe-ffn-hidden-size 256 --moe-router-score-function sigmoid"],
    [f"{EP} 2", f"{EP} 2", f"{EP} 4", f"{EP} 8", ""],
    ["", "", "--moe-layer-freq 2", "--moe-router-load-balancing-type seq_aux_loss "
     "--moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"],
    ["", "", "--overlap-moe-expert-parallel-comm"],
    ["", "", MXFP8, "--fp8-format hybrid --fp8-recipe tensorwise",
     "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16",
     "--fp8-format e4m3 --fp8-recipe rowwise", BLOCKWISE],
    ["", "", "--fp8-wgrad-bf16", "--first-last-layers-bf16"],
    ["", "", "--clip-grad 0", "--clip-grad 0.3"],
    ["", "", "--decoupled-lr 1e-4"],
    ["", "--use-rope-scaling"],
    ["", "", "", "--qk-layernorm"],
    ["--micro-batch-size 1", "--micro-batch-size 1", "--micro-batch-size 2"],
    ["--global-batch-size 8", "--global-batch-size 16"],
    ["--num-layers 4", "--num-layers 8", "--num-layers 7"],
    ["--num-query-groups 2", "--num-query-groups 4", "--num-query-groups 1"],
    ["", "", "", "--rank-order pp-dp-tp-cp", "--rank-order dp-cp-tp-pp",
     "--rank-order tp-cp-pp-dp"],
    ["", "", "--log-params-norm", "--log-max-attention-logit"],
    ["", "", "--on-spike report"],
    ["", "", "--rehearse-device a100", "--rehearse-device b200"],
    ["", "", "--manual-gc"],
    ["", "", "--param-group embedding.* frozen"],
]  # fmt: skip
NEEDS = {  # flags that begin so go, unless one of these is drawn
    CP: ("--cp-comm",),
    PP: ("--pipeline", "--num-virtual", "--defer"),
    "--sequence-parallel": ("--tp-comm",),
    "--zero-stage": ("--fp8-param", "--num-dist", "--optimizer-cpu"),
    "--zero-stage 2|--zero-stage 3": ("--zero-reduce",),
    "--fp8-format": ("--fp8", "--first-last"),
    "--num-experts": ("--moe", "--expert", "--overlap-moe"),
}
EXCLUDE = {  # flags that begin so go where one of these is drawn
    "--num-experts": ("--fp8", "--first-last", "--cpu-offload"),
    FULL: ("--cpu-offload",),
    "--fp8-format": ("--rehearse-device a100",),
    BLOCKWISE: ("--rehearse-device",),
    MXFP8: ("--rehearse-device",),
}
MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --hidden-size 256
    --num-attention-heads 4 --group-query-attention --ffn-hidden-size 512 --seq-length 128
    --max-position-embeddings 128 --lr 1e-3 --train-iters 8 --bf16 --ddp-bucket-size 65536
""".split()


class Drawn(NamedTuple):
    """A layout: its ranks, the one that is rehearsed, and its flags."""

    world: int
    rank: int
    flags: str


def draw(seed: int, count: int, without: tuple[str, ...] = ()) -> list[Drawn]:
    """Return so many layouts, which may be refused. without: how flags begin that are left out."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        flags = [chance.choice(values) for values in CHOICES]
        flags = [flag for flag in flags if flag and not flag.startswith(without or "\n")]
        if any(flag.startswith("--num-experts") for flag in flags):
            flags = [f if f != f"{TP} 2" else f"{f} --sequence-parallel" for f in flags]
        for needed, others in NEEDS.items():
            if not any(name in flag for name in needed.split("|") for flag in flags):
                flags = [flag for flag in flags if not flag.startswith(others)]
        for present, others in EXCLUDE.items():
            if any(flag.startswith(present) for flag in flags):
                flags = [flag for flag in flags if not flag.startswith(others)]
        parts = 1
        for flag in flags:
            if flag.startswith((TP, PP, CP)):
                parts *= int(flag.split()[1])
        world = parts * chance.choice([1, 2, 2, 4])
        found.append(Drawn(world, chance.randrange(world), " ".join(flags)))
    return found


def accepted(seed: int, model: Sequence[str], without: tuple[str, ...] = ()) -> Drawn:
    """Return the first layout of a seed that no rule refuses."""
    for each in draw(seed, 200, without):
        words = [*model, *each.flags.split(), "--rehearse"]
        try:
            matrices.check(parse(words, each.world), pretrain_llama.model_provider)
        except UsageError:
            continue
        return each
    raise AssertionError(f"no layout of seed {seed} is accepted")
