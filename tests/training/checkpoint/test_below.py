# SPDX-License-Identifier: Apache-2.0
"""A folder above a checkpoint: tools take the one below it, a run names those that are there."""

import shutil

import pytest
import torch

import pretrain_llama
from mpu.grid import Grid
from tools import checkpoint, generate
from training.checkpoint.errors import CheckpointError
from training.checkpoint.find import at_or_below

FLAGS = """--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3
    --mock-data --vocab-size 100 --device cpu --train-iters 1""".split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make runs/one/checkpoints with a step, and beside it the model for Hugging Face."""
    runs = tmp_path_factory.mktemp("runs")
    saved = ["--save", str(runs / "one/checkpoints"), "--save-hf", str(runs / "one/hf")]
    assert pretrain_llama.main([*FLAGS, *saved]) == 0
    return runs


def test_tools_take_the_one_run_below(runs, capsys):
    for above in (runs, runs / "one", runs / "one/checkpoints"):
        assert at_or_below(above) == runs / "one/checkpoints"
    model, found = generate.load_model(str(runs), Grid(), torch.device("cpu"), None)
    assert found.directory.parent == runs / "one/checkpoints" and model.config.num_layers == 1
    assert checkpoint.main(["show", str(runs)]) == 0
    assert "step_00000001" in capsys.readouterr().out
    models = runs / "one/hf"
    assert at_or_below(models).name in ("hf", "step_00000001")


def test_of_several_they_are_named_and_nothing_below_is_nothing(runs, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(runs / "one/checkpoints", tmp_path / name)
    with pytest.raises(CheckpointError, match=f"give one, such as {tmp_path}/a, {tmp_path}/b$"):
        at_or_below(tmp_path)
    (tmp_path / "c").mkdir()
    assert at_or_below(tmp_path / "c") == tmp_path / "c"


@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint", "--branch-from"])
def test_a_run_names_those_below_instead_of_starting_afresh(flag, runs, tmp_path, capsys):
    new = ["--save", str(tmp_path / "new"), "--load", str(tmp_path / "new")]
    more = new if flag == "--branch-from" else []
    assert pretrain_llama.main([*FLAGS, *more, flag, str(runs)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{flag} {runs}: no checkpoint there" in line
    assert line.endswith(f"give one, such as {runs}/one/checkpoints)")


def test_use_checkpoint_args_names_those_below(runs, capsys):
    argv = ["--use-checkpoint-args", "--load", str(runs), "--lr", "1", "--train-iters", "2"]
    assert pretrain_llama.main([*argv, "--mock-data", "--seq-length", "32"]) == 2
    assert f"give one, such as {runs}/one/checkpoints" in capsys.readouterr().err


def test_a_new_run_above_others_begins(runs, tmp_path, capsys):
    above = shutil.copytree(runs, tmp_path / "above")
    both = ["--save", str(above), "--load", str(above)]
    assert pretrain_llama.main([*FLAGS, *both]) == 0
    assert "starting fresh" in capsys.readouterr().out
