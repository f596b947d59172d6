# SPDX-License-Identifier: Apache-2.0
"""The flags of float8: what they refuse before any collective, and what a resume says of them."""

import shlex
from types import SimpleNamespace

import pytest
import torch

from mpu.layers.float8 import cuda as float8_cuda
from mpu.layers.float8.recipe import BLOCKS
from training.flags import parallel_rules
from training.flags.parse import parse
from training.run import same_run
from training.settings.config import UsageError
from training.settings.float8_layers import layers_in_bf16

SMALL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --kv-channels 128 --ffn-hidden-size "
    "512 --seq-length 128 --lr 1e-3 --train-iters 10 --mock-data --vocab-size 100 --device cpu"
)
ON = "--fp8-format hybrid"


def read(more="", world=1):
    return parse(shlex.split(f"{SMALL} {more}"), world)


MISTAKES = [
    # more flags, world size, what the sentence must hold
    (f"{ON} --fp8-amax-history-len 0", 1, "--fp8-amax-history-len 0: must be a whole number >= 1"),
    (f"{ON} --fp8-amax-compute-algo mean", 1, "mean: must be one of most_recent, max"),
    (f"{ON} --fp8-recipe custom", 1, "a layer of your --model-file takes as recipe="),
    (f"{ON} --fp8-recipe x", 1, "--fp8-recipe x: must be one of tensorwise, rowwise, blockwise"),
    ("--fp8-format e5m2 --fp8-recipe rowwise", 1, "--fp8-format e5m2: must be one of e4m3, hybrid"),
    ("--keep-fp8-transpose-cache", 1, "weights are gathered in their own dtype"),
    ("--fp8-output-proj", 1, "an output layer in float8 is not available here"),
    (
        f"{ON} --fp8-recipe blockwise --tensor-model-parallel-size 8 --num-attention-heads 8 "
        "--ffn-hidden-size 512",
        8,
        "--fp8-recipe blockwise: --ffn-hidden-size 512 over --tensor-model-parallel-size 8 is 64, "
        "which is not a multiple of 128",
    ),
    (
        f"{ON} --fp8-recipe blockwise --context-parallel-size 2",
        2,
        "--micro-batch-size 1 x --seq-length 128 / (2 x --context-parallel-size 2) is 32, which is "
        "not a multiple of 128",
    ),
    (
        f"{ON} --fp8-recipe rowwise --context-parallel-size 4 --seq-length 96",
        4,
        "--seq-length 96 / (--context-parallel-size 4) is 24, which is not a multiple of 16",
    ),
    (
        f"{ON} --fp8-recipe mxfp8 --group-query-attention --num-query-groups 2 --kv-channels 24",
        1,
        "--num-query-groups 2 x --kv-channels 24 in all is 48, which is not a multiple of 32",
    ),
    (f"{ON} --fp8-recipe mxfp8 --seq-length 48", 1, "--micro-batch-size 1 x --seq-length 48 is 48"),
    (f"{ON} --fp8-recipe rowwise --hidden-size 100", 1, "--hidden-size 100 is 100, which is not a"),
    (
        f"{ON} --fp8-recipe rowwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 3",
        1,
        "--num-layers-at-start-in-bf16 3 and --num-layers-at-end-in-bf16 1 leave none of "
        "--num-layers 4 in float8",
    ),
]


@pytest.mark.parametrize("more,world,sentence", MISTAKES, ids=[m[2][:60] for m in MISTAKES])
def test_a_mistake_is_one_sentence(more, world, sentence):
    with pytest.raises(UsageError) as mistake:
        read(more, world)
    assert sentence in str(mistake.value) and "\n" not in str(mistake.value)


@pytest.mark.parametrize("recipe", BLOCKS)
def test_a_recipe_that_fits_is_taken(recipe):
    config = read(f"{ON} --fp8-recipe {recipe} --no-fp8-wgrad --micro-batch-size 2")
    assert config.float8.fp8_recipe == recipe and config.float8.fp8_wgrad_bf16
    assert layers_in_bf16(config) == set()
    more = "--first-last-layers-bf16 --num-layers-at-end-in-bf16 2"
    assert layers_in_bf16(read(f"{ON} --fp8-recipe {recipe} {more}")) == {0, 2, 3}


def test_what_has_nothing_to_act_on_is_told():
    notes = read("--fp8-recipe rowwise --fp8-wgrad-bf16 --num-layers-at-end-in-bf16 2").notes
    for flag, needs in (
        ("--fp8-recipe", "--fp8-format"),
        ("--fp8-wgrad-bf16", "--fp8-format"),
        ("--num-layers-at-end-in-bf16", "--first-last-layers-bf16"),
    ):
        assert f"{flag} has no effect without {needs}" in notes


def test_a_gpu_needs_bf16(monkeypatch):
    monkeypatch.setattr(parallel_rules, "on_cpu", lambda config: False)
    with pytest.raises(UsageError, match="--fp8-format hybrid needs --bf16, or --device cpu"):
        read(f"{ON} --fp8-recipe rowwise")
    read(f"{ON} --fp8-recipe rowwise --bf16")


@pytest.mark.parametrize(
    "recipe, capability, said",
    [
        ("tensorwise", (8, 0), "needs a GPU of compute capability 8.9 or more"),
        ("rowwise", (8, 9), ""),
        ("blockwise", (9, 0), ""),
        ("blockwise", (10, 0), "9.0 (Hopper); on Blackwell use mxfp8: a GPU has 10.0"),
        ("mxfp8", (9, 0), "10.0 or more (Blackwell); on Hopper use blockwise: a GPU has 9.0"),
        ("mxfp8", (10, 3), ""),
    ],
)
def test_a_gpu_that_cannot_multiply_so_is_named(monkeypatch, recipe, capability, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    why = float8_cuda.unsupported(recipe, torch.device("cuda"))
    assert said in why and bool(said) == bool(why)


def test_a_resume_may_switch_and_says_so():
    found = SimpleNamespace(directory="run/1", state={"config": read().flat()})
    config = read(f"{ON} --fp8-recipe rowwise")
    told = list(same_run.lines(found, config, {}))
    assert told == [
        "run/1 was made without --fp8-format and this run has --fp8-format 'hybrid'",
        "run/1 was made without --fp8-recipe and this run has --fp8-recipe 'rowwise'",
    ]
    assert not list(same_run.changes(found, config, {}))
    assert not list(same_run.lines(found, read(), {}))
    assert read().digest() == config.digest()
