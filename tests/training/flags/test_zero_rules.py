# SPDX-License-Identifier: Apache-2.0
"""The flags of the sharded optimizer: what they refuse, and what they say has no effect."""

import shlex

import pytest
import torch

from training.flags.parse import parse
from training.settings.config import UsageError

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--train-iters 10 --mock-data --vocab-size 100"
)
EACH = "--zero-reduce-each-microbatch"
INSTANCES = "--num-distributed-optimizer-instances"


def read(more="", world=4):
    return parse(shlex.split(f"{SMALL} {more}"), world)


MISTAKES = [
    # more flags, world size, what the sentence must hold
    ("--zero-stage 0 --use-distributed-optimizer", 4, "the latter is --zero-stage 1"),
    (EACH, 4, f"{EACH} needs --zero-stage 2 or 3: at --zero-stage 0 every rank keeps all grad"),
    (
        f"{EACH} --zero-stage 2 --pipeline-model-parallel-size 2",
        4,
        f"{EACH} needs --pipeline-model-parallel-size 1, not 2",
    ),
    (f"{INSTANCES} 3 --zero-stage 1", 4, f"{INSTANCES} 3 does not divide the 4 data-parallel"),
    (f"{INSTANCES} 2", 4, f"{INSTANCES} 2 needs --use-distributed-optimizer or --zero-stage"),
    ("--grad-reduce-in-bf16 --fp64", 4, "--grad-reduce-in-bf16 and --fp64 exclude each other"),
    ("--main-grads-dtype bf16 --zero-stage 2", 4, "--main-grads-dtype bf16 needs --bf16"),
    (
        "--main-grads-dtype bf16 --bf16 --zero-stage 1 --accumulate-allreduce-grads-in-fp32",
        4,
        "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 contradict",
    ),
    ("--optimizer-backend apex --device cpu", 1, "--optimizer-backend apex needs --device cuda"),
    ("--optimizer-backend te --fp64", 1, "--optimizer-backend te has no fp64"),
    (
        "--optimizer-backend apex --optimizer-cpu-offload",
        1,
        "--optimizer-backend apex with --optimizer-cpu-offload: the host updates, so use torch",
    ),
    (
        "--optimizer-cpu-offload --offload-optimizer-states",
        1,
        "--optimizer-cpu-offload with --optimizer-state-offload: the first updates on the host and "
        "the second on the device; give one of them",
    ),
]


@pytest.mark.parametrize("more,world,sentence", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_sentence(more, world, sentence):
    with pytest.raises(UsageError) as mistake:
        read(more, world)
    assert sentence in str(mistake.value)
    assert "\n" not in str(mistake.value) and len(str(mistake.value)) < 300


def test_instances_are_groups_of_data_and_context_parallel_ranks():
    flags = f"{INSTANCES} 4 --zero-stage 1 --context-parallel-size 2"
    assert read(flags, 8).parallel.shard_size == 2
    with pytest.raises(UsageError, match="4 does not divide the 6 data- and context-parallel"):
        read(flags, 6)


@pytest.mark.parametrize(
    "more",
    [
        "--use-distributed-optimizer --zero-stage 3 --overlap-param-gather",
        f"--zero-stage 2 {EACH} --global-batch-size 8",
        f"--zero-stage 3 --overlap-param-gather {EACH} --global-batch-size 8",
        f"--zero-stage 1 {INSTANCES} 2 --grad-reduce-in-bf16 --bf16 --main-grads-dtype bf16",
        "--main-grads-dtype fp32 --grad-reduce-in-bf16 --on-nan skip",
        "--zero-stage 2 --pipeline-model-parallel-size 2",
        "--optimizer-cpu-offload --zero-stage 1 --dry-run",
        "--use-distributed-optimizer --overlap-param-gather",
        "--overlap-grad-reduce",
    ],
)
def test_what_goes_together_says_nothing(more):
    assert read(more).notes == ()


NOTES = [
    # more flags, world size, the line
    (
        "--zero-stage 3",
        2,
        "--zero-stage 3 without --overlap-param-gather: every block waits for its weights",
    ),
    (
        "--zero-stage 3 --overlap-param-gather --pipeline-model-parallel-size 2",
        4,
        "--zero-stage 3 in a pipeline: a stage's weights stay gathered from their first use in a "
        "step to the last, so they are sharded only between steps",
    ),
    (
        "--optimizer-cpu-offload --device cpu",
        2,
        "--optimizer-cpu-offload has no effect with --device cpu: the optimizer's state is "
        "in host memory already",
    ),
    (
        "--optimizer-state-offload --device cpu",
        1,
        "--optimizer-state-offload with --device cpu copies the state within host memory and saves "
        "no memory",
    ),
    (
        f"--zero-stage 2 {EACH}",
        2,
        f"{EACH} has no effect: a step has one micro-batch",
    ),
    (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--grad-reduce-in-bf16 --tensor-model-parallel-size 2",
        2,
        "--use-distributed-optimizer, --overlap-grad-reduce, --overlap-param-gather, "
        "--grad-reduce-in-bf16 have no effect: there is one data-parallel rank",
    ),
]


@pytest.mark.parametrize("more,world,line", NOTES, ids=[n[0] for n in NOTES])
def test_what_has_no_effect_is_said_once(more, world, line):
    assert read(more, world).notes == (line,)


@pytest.mark.parametrize("cuda", [True, False])
def test_where_the_state_lies_follows_the_device_that_is_there(monkeypatch, cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    notes = read("--optimizer-cpu-offload", 1).notes
    assert bool(notes) is not cuda
    assert read("--optimizer-cpu-offload --dry-run", 1).notes == ()  # of a GPU, wherever it runs
