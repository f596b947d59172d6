# SPDX-License-Identifier: Apache-2.0
"""Every layout and ZeRO stage takes the weights of a Hugging Face directory, to the bit.

The directory holds the canonical state (tests/training/checkpoint/canonical.py), in one file or in
shards, so what a rank must have afterwards is known without a run.
"""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model.llama import hf_config
from mpu.grid import Grid
from tests.training.checkpoint import canonical
from tests.training.checkpoint.canonical import Canonical, same_bits, saver_of
from tests.training.checkpoint.test_reshard import alone, every_case, name_of, ranks
from training.checkpoint import CheckpointError
from training.settings.arguments import CheckpointConfig

Case = dict


def hugging_face(folder: Path, case: Case, shards: int, more: str = "") -> Path:
    """Write the canonical weights as a Hugging Face directory; several shards have the names of a
    base model, without "model.". more: a tensor of no model.
    """
    folder.mkdir()
    state = Canonical(case)
    tensors = {name: state.whole(name) for name in state.shapes}
    if more:
        tensors[more] = torch.zeros(3)
    if shards > 1:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        file_of = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
            file_of |= dict.fromkeys(names[i::shards], file)
        index = {"metadata": {}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = hf_config(canonical.build(Grid(), alone(case)).model.config, case["dtype"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_in(comm, some: list[tuple[Case, str, str]]) -> list[str]:
    """On one rank, for each (case, directory, flag): load, and check weights and masters; or return
    the refusals."""
    found = []
    for case, root, flag in some:
        grid = comm.grid(case["tp"], pp=case["pp"], instances=case.get("instances", 1))
        run = canonical.build(grid, case, seed=6)
        saver = saver_of(run, root)
        saver.resume.config = replace(saver.config, checkpoint=CheckpointConfig(**{flag: root}))
        try:
            assert saver.resume.load() == (0, 0)
        except CheckpointError as error:
            found.append(str(error))
            continue
        for what, tensor, values, _ in Canonical(case).held(run):
            if what.startswith("weights"):
                assert same_bits(tensor, values), (name_of(case), comm.rank, what)
            elif what.startswith("master"):
                assert same_bits(tensor, tensor.bfloat16().float()), (name_of(case), what)
        assert run.optimizer.steps == 0
    return found


def sample() -> list[Case]:
    """Draw a layout of two and one of four ranks, whose weights are sharded."""
    rng, every = random.Random(3), every_case()
    wanted = [(2, 3), (4, 3)]
    return [
        rng.choice([c for c in every if ranks(c) == size and c["zero"] == zero and c["dp"] < 4])
        for size, zero in wanted
    ]


def check(world, folder: Path, cases: list[Case]) -> None:
    made: dict[str, Path] = {}
    jobs: dict[int, list[tuple[Case, str, str]]] = {}
    for i, case in enumerate(cases):
        shards = (1, 4)[i % 2]
        key = f"{shards} {name_of(alone(case))}"
        if key not in made:
            made[key] = hugging_face(folder / str(len(made)), alone(case), shards)
        flag = ("load", "pretrained_checkpoint")[i // 2 % 2]
        jobs.setdefault(ranks(case), []).append((case, str(made[key]), flag))
    for size, some in jobs.items():
        for first in range(0, len(some), 5):  # a world answers within its time-out
            refused = world(size).run(load_in, some[first : first + 5])
            assert refused == [[]] * size


def test_a_sample_of_the_layouts(world, tmp_path):
    check(world, tmp_path, sample())


@pytest.mark.prove
@pytest.mark.parametrize("size", range(1, 9))
def test_every_layout(world, tmp_path, size):
    cases = [case for case in every_case() if ranks(case) == size]
    check(world, tmp_path, cases)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_tensor_of_no_model_is_refused_as_such(world, tmp_path, zero):
    case = dict(model=24, tp=1, pp=1, dp=2, sp=False, zero=zero, tied=True, dtype="float32")
    root = hugging_face(tmp_path / "hf", alone(case), 1, more="model.layers.0.bias")
    for (said,) in world(2).run(load_in, [(case, str(root), "load")]):
        wanted = f"--load: {root}: model.layers.0.bias is not a tensor of the Llama in config.json"
        assert re.fullmatch(re.escape(wanted), said)
