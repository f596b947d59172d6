# SPDX-License-Identifier: Apache-2.0
"""--sample-interval prints how the model goes on, the same in every layout, and changes no bit."""

import json
import re

import pytest

import pretrain_llama
from tests.launcher import Launcher
from training.run import sample
from training.run.sample import NEW, continue_prompt

FLAGS = """
    --mock-data --vocab-size 53 --num-layers 4 --hidden-size 40 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 48 --num-workers 0 --device cpu --fp64
    --train-iters 6 --lr 1e-2 --micro-batch-size 2 --global-batch-size 8 --log-interval 1
"""
SAMPLES = "--sample-interval 2 --sample-prompt"
PROMPT = "7 8 9"


def train(tmp_path, name, *more):
    """Train in this process; return each step's loss and norm."""
    log = tmp_path / name
    assert pretrain_llama.main([*FLAGS.split(), "--log-json", str(log), *more]) == 0
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def test_a_sample_changes_no_bit(tmp_path, capsys):
    plain = train(tmp_path, "plain")
    capsys.readouterr()
    assert train(tmp_path, "sampled", *SAMPLES.split(), PROMPT) == plain and len(plain) == 6
    said = capsys.readouterr().out
    samples = re.findall(r"sample at iteration (\d), after '7 8 9':\n    ( ?[\d ]+)\n", said)
    assert [int(step) for step, _ in samples] == [2, 4, 6]
    assert all(0 < len(text.split()) <= NEW for _, text in samples)


@pytest.mark.prove
def test_without_a_prompt_it_goes_on_with_held_out_text(tmp_path, capsys):
    train(tmp_path, "log", "--sample-interval", "6", "--eval-interval", "6", "--eval-iters", "1")
    (before,) = re.findall(r"sample at iteration 6, after '([\d ]+)':\n", capsys.readouterr().out)
    assert len(before.split()) == sample.PROMPT_TOKENS


def test_a_token_is_the_likeliest_after_what_came_before(monkeypatch):
    """At temperature 0 every token is what one forward of all before it says."""
    import torch

    from mpu.launch import Launch
    from training.faults.monitor import FailureMonitor
    from training.flags.parse import parse

    monkeypatch.setattr(sample, "TEMPERATURE", 0)
    config = parse(FLAGS.split(), 1)
    grid = pretrain_llama.make_grid(config, Launch())
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    made, ids = continue_prompt(run, [7, 8, 9], 5), [7, 8, 9]
    with torch.no_grad():
        for token in made:
            assert token == int(run.model(torch.tensor([ids]))[-1, 0, :53].argmax())
            ids.append(token)


LAYOUTS = {
    "tp 2, sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp 2, zb-v": "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v",
    "dp 2, ZeRO 3": "--zero-stage 3 --overlap-param-gather",
}


@pytest.mark.prove
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_draws_the_same_and_changes_no_bit(launcher: Launcher, layout, tmp_path):
    train(tmp_path, "one", *SAMPLES.split(), PROMPT)
    argv = [*FLAGS.split(), *LAYOUTS[layout].split()]
    plain = launcher.run(2, argv)
    sampled = launcher.run(2, [*argv, *SAMPLES.split(), PROMPT])
    assert plain.codes == sampled.codes == [0, 0], (plain.said(0), sampled.said(0))
    assert sampled.losses() == plain.losses() and len(plain.losses()) == 6
    assert sampled.said(0, "out").count("sample at iteration") == 3


@pytest.mark.prove
def test_layouts_agree_on_the_text(launcher: Launcher, tmp_path, capsys):
    train(tmp_path, "one", *SAMPLES.split(), PROMPT)
    alone = re.findall(r"sample at .*\n.*\n", capsys.readouterr().out)
    assert len(alone) == 3
    for layout in LAYOUTS.values():
        done = launcher.run(2, [*FLAGS.split(), *layout.split(), *SAMPLES.split(), PROMPT])
        assert re.findall(r"sample at .*\n.*\n", done.said(0, "out")) == alone, layout
