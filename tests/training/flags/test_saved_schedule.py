# SPDX-License-Identifier: Apache-2.0
"""--use-checkpoint-opt-param-scheduler: the schedule of the checkpoint, as Megatron restores it."""

import shlex
from types import SimpleNamespace

import pytest

from training.flags import saved_schedule
from training.flags.parse import parse
from training.settings.config import UsageError
from training.settings.learning_rate import learning_rate

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100"
FLAG = "--use-checkpoint-opt_param-scheduler"
SAVED = (
    "--train-iters 100 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 10 --lr-decay-style cosine "
    "--weight-decay 0.2 --global-batch-size 4"
)
NOW = "--train-iters 500 --lr 7 --lr-decay-style WSD --lr-wsd-decay-iters 5 --global-batch-size 4"


def read(more):
    return parse(shlex.split(f"{MODEL} --mock-data {more}"), 1)


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """Let --load hold a checkpoint of the run with the flags given; a test calls it."""

    def hold(flags):
        state = {"config": read(flags).flat()} if flags else {}
        found = SimpleNamespace(directory=tmp_path, state=state) if flags is not None else None
        monkeypatch.setattr(saved_schedule, "newest", lambda flag, root, step: found)
        return f"--load {tmp_path}"

    return hold


def test_the_curve_is_the_checkpoints_from_its_first_to_its_last_step(saved):
    here, there = read(f"{NOW} {saved(SAVED)} {FLAG}"), read(SAVED)
    for consumed in range(0, 4 * 120, 4):
        assert learning_rate(here, consumed) == learning_rate(there, consumed)
    assert here.optimizer.weight_decay == 0.2
    assert here.batch.train_iters == 500  # the run's own length is not the schedule's


def test_samples_and_a_warmup_fraction(saved):
    there = "--train-samples 400 --lr 1e-2 --lr-warmup-fraction 0.25 --weight-decay 0.2"
    more = f"--train-samples 800 --lr 1 --lr-warmup-samples 7 {saved(there)} {FLAG}"
    for consumed in range(0, 500, 20):
        assert learning_rate(read(more), consumed) == learning_rate(read(there), consumed)


@pytest.mark.parametrize("flags", [None, ""])
def test_a_fresh_start_follows_the_flags(saved, flags):
    """Also from a Hugging Face directory, which holds no schedule."""
    assert read(f"{NOW} {saved(flags)} {FLAG}").optimizer.lr == 7


def test_a_branch_has_the_schedule_of_its_trunk_until_it_has_its_own(monkeypatch, tmp_path):
    """--ckpt-step is that of the trunk."""
    trunk, own = (SimpleNamespace(directory=tmp_path, state={"config": read(flags).flat()})
                  for flags in (SAVED, SAVED.replace("1e-2", "2e-3")))  # fmt: skip
    more = f"--load {tmp_path} --save {tmp_path} --branch-from trunk --ckpt-step 100"
    for there, lr in ({"--branch-from": trunk}, 1e-2), ({"--load": own}, 2e-3):
        asked = []

        def newest(flag, root, step, there=there, asked=asked):
            asked.append((flag, step))
            return there.get(flag)

        monkeypatch.setattr(saved_schedule, "newest", newest)
        assert read(f"{NOW} {more} {FLAG}").optimizer.lr == lr
        assert asked == [("--load", None), ("--branch-from", 100)][: len(asked)] != []


@pytest.mark.parametrize("weights_only", ["--finetune", "--no-load-optim"])
def test_where_only_weights_are_loaded_the_flags_hold(saved, weights_only):
    config = read(f"{NOW} {saved(SAVED)} {FLAG} {weights_only}")
    assert config.optimizer.lr == 7
    assert any(f"no effect with {weights_only}" in note for note in config.notes)


def test_lengths_in_another_unit_are_refused(saved):
    more = f"--train-samples 800 --lr 1 {saved(SAVED)} {FLAG}"
    with pytest.raises(UsageError, match="a run with --train-iters, so its schedule counts it"):
        read(more)
    more = f"{NOW.replace('size 4', 'size 8')} {saved(SAVED)} {FLAG}"
    with pytest.raises(UsageError, match="in steps of 4 samples: --global-batch-size is 8 and"):
        read(more)


def test_it_has_nothing_to_act_on_without_load_and_excludes_its_opposite():
    assert any("no effect without --load" in note for note in read(f"{SAVED} {FLAG}").notes)
    with pytest.raises(UsageError, match="exclude each other"):
        read(f"{SAVED} {FLAG} --override-opt_param-scheduler")
