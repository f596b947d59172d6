# SPDX-License-Identifier: Apache-2.0
"""The flags of CUDA graphs: where they are refused, by which flag and for which reason."""

import shlex

import pytest
import torch

from training.flags.parse import parse
from training.settings.config import UsageError

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 --dry-run "
    "--train-iters 10 --mock-data --vocab-size 100 --cuda-graph --global-batch-size 8"
)
UNTIED = "--untie-embeddings-and-output-weights"


def read(more="", world=1, base=SMALL):
    return parse(shlex.split(f"{base} {more}"), world)


MISTAKES = [
    # more flags, world size, what the sentence must hold
    ("", 1, "--cuda-graph with tied embeddings, without --untie-embeddings-and-output-weights: "),
    (f"{UNTIED} --device cpu", 1, "--cuda-graph with --device cpu: a CPU has no CUDA graphs"),
    (
        f"{UNTIED} --pipeline-model-parallel-size 2",
        2,
        "--cuda-graph with --pipeline-model-parallel-size 2: the host decides when messages are",
    ),
    (
        f"{UNTIED} --cpu-offload-activations",
        1,
        "--cuda-graph with --cpu-offload-activations: its host memory differs between",
    ),
    (
        f"{UNTIED} --optimizer-state-offload",
        1,
        "--cuda-graph with --optimizer-state-offload: layers say when state comes and goes",
    ),
    (f"{UNTIED} --zero-stage 3", 2, "--cuda-graph with --zero-stage 3: weights are gathered into"),
    (f"{UNTIED} --zero-stage 2", 2, "--cuda-graph with --zero-stage 2: full gradients have"),
    (
        f"{UNTIED} --reset-attention-mask",
        1,
        "--cuda-graph with --reset-attention-mask: documents have different lengths in each",
    ),
    (
        f"{UNTIED} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap symmetric",
        2,
        "--cuda-graph with --tp-comm-overlap symmetric: the host counts what its flags wait for",
    ),
    (
        f"{UNTIED} --overlap-grad-reduce --overlap-param-gather --zero-stage 1",
        4,
        "--cuda-graph with --overlap-grad-reduce and --overlap-param-gather: their micro-batches "
        "are eager, and a step has 2: take a larger batch",
    ),
    (f"{UNTIED} --cuda-graph-impl local", 1, "--cuda-graph captures a whole micro-batch"),
]


@pytest.mark.parametrize("more,world,sentence", MISTAKES, ids=[m[2][:70] for m in MISTAKES])
def test_a_mistake_is_one_sentence(more, world, sentence):
    with pytest.raises(UsageError) as mistake:
        read(more, world)
    assert sentence in str(mistake.value) and "\n" not in str(mistake.value)


def test_the_warm_up_needs_the_graph():
    with pytest.raises(UsageError, match="--cuda-graph-warmup-steps 5 needs --cuda-graph"):
        read("--cuda-graph-warmup-steps 5", base=SMALL.replace("--cuda-graph ", ""))


@pytest.mark.parametrize("more,world", [
    ("", 1), ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    ("--zero-stage 1 --overlap-grad-reduce --recompute-granularity full", 2),
    ("--eod-mask-loss --reset-position-ids --fp8-format hybrid --fp8-recipe tensorwise --bf16", 1),
])  # fmt: skip
def test_what_goes_with_it(more, world):
    assert read(f"{UNTIED} {more}", world).gpu.cuda_graph


def test_megatrons_name():
    config = read(f"{UNTIED} --enable-cuda-graph", base=SMALL.replace("--cuda-graph ", ""))
    assert config.gpu.cuda_graph and config.gpu.cuda_graph_warmup_steps == 3


def test_buffers_that_nccl_would_register(monkeypatch):
    """Only where the run begins: a plan may be made on another machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    tp = f"{UNTIED} --tensor-model-parallel-size 2 --sequence-parallel"
    assert read(tp, 2).gpu.cuda_graph
    with pytest.raises(UsageError, match="--cuda-graph: NCCL_GRAPH_REGISTER is 1 in the env"):
        read(tp, 2, SMALL.replace("--dry-run ", ""))
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert read(tp, 2, SMALL.replace("--dry-run ", "")).gpu.cuda_graph
