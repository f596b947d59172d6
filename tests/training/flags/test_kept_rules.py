# SPDX-License-Identifier: Apache-2.0
"""The flags of activations in host memory: what they refuse, and what they stand for."""

import shlex

import pytest
import torch

from pretrain_llama import model_provider
from training.flags.parse import parse
from training.run.model_profile import rank_model
from training.run.pipeline_stages import rank_stages
from training.settings.config import UsageError
from training.settings.layer_options import recompute_of

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--train-iters 10 --mock-data --vocab-size 100 --device cpu"
)
ON = "--cpu-offload-activations"


def read(more="", world=1):
    return parse(shlex.split(f"{SMALL} {more}"), world)


MISTAKES = [
    # more flags, world size, what the sentence must hold
    ("--offload-modules mlp", 1, "--offload-modules mlp needs --cpu-offload-activations"),
    ("--cpu-offloading-num-layers 2", 1, "only 0 is accepted; --cpu-offload-activations offloads"),
    ("--min-offloaded-tensor-size 5", 1, "--min-offloaded-tensor-size 5 needs --cpu-offload-act"),
    (
        f"{ON} --pipeline-model-parallel-size 4",
        4,
        "--num-layers 4 in 4 pipeline stages gives no stage a second layer",
    ),
    (
        f"{ON} --recompute-granularity full --recompute-num-layers 4",
        1,
        "--recompute-num-layers 4 gives no stage a second group",
    ),
    (
        f"{ON} --offload-modules mlp --recompute-granularity full",
        1,
        "--offload-modules mlp with --recompute-granularity full: a recomputed layer saves only",
    ),
    (
        "--activation-offload-fraction 0.5",
        1,
        "--offload-modules chooses the modules",
    ),
]


@pytest.mark.parametrize("more,world,sentence", MISTAKES, ids=[m[2][:60] for m in MISTAKES])
def test_a_mistake_is_one_sentence(more, world, sentence):
    with pytest.raises(UsageError) as mistake:
        read(more, world)
    assert sentence in str(mistake.value) and "\n" not in str(mistake.value)


def test_a_layout_with_two_layers_in_a_stage_has_something_to_offload():
    layout = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout"
    assert read(f"{ON} {layout} E|tt|tt|L", 4).gpu.cpu_offload_activations
    with pytest.raises(UsageError, match="gives no stage a second layer"):
        read(f"{ON} {layout} Et|t|t|tL", 4)


def test_a_module_that_no_layer_has_is_refused_by_the_names_that_there_are():
    config = read(f"{ON} --offload-modules mlp attention.kqv")
    with pytest.raises(UsageError) as mistake:
        rank_model(config, model_provider, rank_stages(config, model_provider, 0), 0)
    assert (
        "--offload-modules attention.kqv: must be among attention, attention.proj, attention."
        in (str(mistake.value))
    )
    assert "model/llama.py" in str(mistake.value)


@pytest.mark.parametrize("more,on", [
    ("--fine-grained-activation-offloading", True), ("--cpu-offloading-num-layers 0", False),
    ("", False),
])  # fmt: skip
def test_megatrons_flags(more, on):
    offload = recompute_of(read(more), torch.device("cpu")).offload
    assert (offload is not None) == on


def test_the_flags_reach_the_layers():
    more = "--offload-modules mlp attention"
    more += " --min-offloaded-tensor-size 7"
    offload = recompute_of(read(f"{ON} {more}"), torch.device("cpu")).offload
    assert offload is not None and offload.min_size == 7
    assert offload.modules == {"mlp", "attention"}
