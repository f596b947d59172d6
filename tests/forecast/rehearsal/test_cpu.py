# SPDX-License-Identifier: Apache-2.0
"""A rehearsal on the CPU records, event by event, what a rank on gloo does in earnest."""

import pytest

import pretrain_llama
from mpu.launch import Launch
from tests.forecast.rehearsal.compare import difference
from tests.forecast.rehearsal.real import record

MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --num-layers 2 --hidden-size 64
    --num-attention-heads 8 --group-query-attention --num-query-groups 4 --ffn-hidden-size 96
    --seq-length 64 --max-position-embeddings 64 --swiglu --micro-batch-size 2
    --global-batch-size 4 --lr 1e-3 --train-iters 8 --rehearse --rehearse-device cpu --device cpu
"""
TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
ZERO = "--zero-stage"
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
UNTIED = "--untie-embeddings-and-output-weights"
LAYOUTS = {  # name: (ranks, flags)
    "one rank": (1, ""),
    "tp": (2, TP2),
    "sp": (2, SP),
    "sp, no shared memory": (2, f"{SP} --no-shared-memory"),
    "sp, ring": (2, f"{SP} --tp-comm-overlap ring"),
    "sp, symmetric": (2, f"{SP} --tp-comm-overlap symmetric"),
    "sp, bf16": (2, f"{SP} --bf16"),
    "full recompute": (2, f"{SP} --recompute-granularity full"),
    "selective recompute": (2, f"{SP} --recompute-granularity selective {UNTIED}"),
    "documents": (2, f"{SP} {DOCUMENTS}"),
    "zero 0": (2, ""),
    "zero 1": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "zero 2": (2, f"{ZERO} 2 --use-distributed-optimizer"),
    "zero 3": (2, f"{ZERO} 3 --use-distributed-optimizer"),
    "zero 3, gloo": (
        2,
        f"{ZERO} 3 --use-distributed-optimizer --no-shared-memory "
        "--overlap-param-gather",
    ),
    "1f1b": (2, PP2),
    "1f1b, untied": (2, f"{PP2} {UNTIED} --bf16"),
    "interleaved": (2, f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    "gpipe": (2, f"{PP2} --pipeline-schedule gpipe"),
    "zb-h1": (2, f"{PP2} --pipeline-schedule zb-h1"),
    "zb-v": (2, f"{PP2} --pipeline-schedule zb-v --num-layers 4"),
    "v-half": (2, f"{PP2} --pipeline-schedule v-half --num-layers 4 --recompute-granularity full"),
    "offload": (
        2,
        f"{PP2} --num-layers 6 --cpu-offload-activations --min-offloaded-tensor-size 1 "
        "--recompute-granularity selective",
    ),
    "tp, dp": (4, f"{SP} --use-distributed-optimizer"),
    "tp, pp": (4, f"{SP} {PP2} --pipeline-schedule zb-v --num-layers 4"),
}


def both(comm, flags):
    """Record a step in earnest and rehearse it; return how the two differ."""
    launch = Launch(comm.rank, comm.size, comm.rank, comm.size)
    argv = [*MODEL.split(), *flags.split()]
    real = record(pretrain_llama, argv, launch, real=True)
    rehearsed = record(pretrain_llama, argv, launch, real=False)
    return difference(real, rehearsed)


QUICK = ("sp, no shared memory",)  # the others under `make prove`


@pytest.mark.parametrize(
    "layout",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.prove) for name in LAYOUTS],
)
def test_events_equal_those_of_a_run_on_gloo(world, layout):
    ranks, flags = LAYOUTS[layout]
    assert world(ranks).run(both, flags) == [""] * ranks
