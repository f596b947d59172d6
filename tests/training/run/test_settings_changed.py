# SPDX-License-Identifier: Apache-2.0
"""A resume says what changes how training goes on: each flag, and the learning rate."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pretrain_llama
from training.flags.parse import parse
from training.run import same_run, settings_changed
from training.settings.arguments import SETTINGS

SIZES = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 100"
FLAGS = f"""{SIZES} --mock-data --micro-batch-size 2 --global-batch-size 4 --log-interval 1
    --device cpu --num-workers 0"""
BEGUN = "--lr 1e-2 --train-iters 6"


def run(folder: Path, more: str, begun: str = BEGUN) -> dict[int, float]:
    """Run; return {iteration: learning rate} of its steps."""
    (log := folder / "log.jsonl").unlink(missing_ok=True)
    words = f"{FLAGS} {begun} {more} --log-json {log}"
    assert pretrain_llama.main(shlex.split(words)) == 0
    rows = [json.loads(row) for row in log.read_text().splitlines()]
    return {row["iteration"]: row["lr"] for row in rows if "lr" in row}


def read(more: str = "", base: str = BEGUN) -> Any:
    return parse(shlex.split(f"{SIZES} --mock-data {base} {more}"), 1)


def told(there: Any, here: Any, **state: Any) -> list[str]:
    """Return the lines of a resume of one config's checkpoint with another one."""
    known = {"config": there.flat(), "numerics": same_run.NUMERICS, **state}
    return list(same_run.lines(SimpleNamespace(directory="run/3", state=known), here, {}))


def test_a_resume_tells_flags_and_the_learning_rate(tmp_path, capsys):
    whole = run(tmp_path, "")
    before = run(tmp_path, f"--save {tmp_path}/saved --exit-interval 3")
    saved = f"{tmp_path}/saved/step_00000003"
    load = f"--load {tmp_path}/saved --exit-interval 4"
    capsys.readouterr()

    assert run(tmp_path, f"{load} --log-params-norm --save {tmp_path}/b")[4] == whole[4]
    said = capsys.readouterr().out
    assert "was made" not in said and "learning rate" not in said and f"loaded {saved}" in said

    other = "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --train-iters 8"
    after = run(tmp_path, f"--load {tmp_path}/saved --weight-decay 0.3 --clip-grad 0.5", other)
    lines = capsys.readouterr().out.splitlines()
    for words in ("lr 0.01|0.001", "min-lr 0.0|0.0001", "lr-decay-style 'linear'|'cosine'",
                  "train-iters 6|8", "weight-decay 0.01|0.3", "clip-grad 1.0|0.5"):  # fmt: skip
        assert f"{saved} was made with --{words.replace('|', ' and this run has ')}" in lines
    assert sum("was made" in line for line in lines) == 6
    (rates,) = (line for line in lines if line.startswith("the learning rate"))
    assert rates == (
        f"the learning rate was {before[3]:.6g} at iteration 3, the last of {saved}, and is "
        f"{after[4]:.6g} at iteration 4; it ends at {after[8]:.6g} at iteration 8 (that run "
        f"would have had {whole[4]:.6g}, and {whole[6]:.6g} at iteration 6)"
    )

    run(tmp_path, f"{load} --save {tmp_path}/c --train-iters 4")
    run(tmp_path, f"--load {tmp_path}/c --train-iters 9")
    assert "at iteration 9 (that run ended at iteration 4)" in capsys.readouterr().out
    run(tmp_path, f"{load} --no-load-optim")
    assert f"{saved}: --no-load-optim resets the optimizer's state" in capsys.readouterr().out
    # the schedule of the checkpoint, whatever the flags say
    run(tmp_path, f"{load} --use-checkpoint-opt-param-scheduler", other)
    said = capsys.readouterr().out
    assert "--train-iters 6 and this run has 8" in said
    assert "--lr" not in said and "learning rate" not in said


def another(row: Any, value: Any) -> Any:
    """Return another value of a setting, as JSON has it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value / 2 if isinstance(value, float) and value else value + 1
    choices = [choice for choice in getattr(row.rule, "choices", ()) if choice != value]
    if isinstance(value, (list, tuple)):
        return choices[:1] or [3]
    return choices[0] if choices else 7


def test_every_setting_that_changes_the_numbers_is_told_with_both_values():
    """Of the optimizer, the batch, the experts, float8, and those that say so themselves."""
    more = "--optimizer muon --qk-clip --decoupled-lr 1e-3 --on-spike report "
    more += "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    more += "--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 1 "
    more += "--lr-decay-style WSD --lr-wsd-decay-iters 2 --moe-expert-capacity-factor 1.5"
    base = BEGUN.replace("6", "9")
    here = read(more, base)  # float8 and experts exclude each other
    float8 = read("--fp8-format hybrid --fp8-recipe delayed").float8
    here = replace(here, float8=replace(float8, first_last_layers_bf16=True))
    compared = {key for keys in same_run.SHARED.values() for key in keys}
    checked = 0
    for key, row in SETTINGS.items():
        section = key.partition(".")[0]
        named = row.reported or (row.reported is None and section in settings_changed.SECTIONS)
        if not named or key in compared or key == "batch.micro_batch_size":
            continue
        now = here.flat().get(key, row.default)
        now = settings_changed._value(key, here.flat()) if now is None else now
        was = another(row, now)
        state = SimpleNamespace(directory="run/3", state={"config": here.flat() | {key: was}})
        said = list(settings_changed.lines(state, here, compared))
        flag = "--" + key.rpartition(".")[2].replace("_", "-")
        assert any(line.startswith("run/3 was made with") and flag in line for line in said), key
        checked += 1
    assert checked > 70


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        ("--lr-decay-iters 6", "", []),  # the same end, by another flag
        ("", "--lr-decay-iters 6 --eval-interval 2 --log-interval 3", []),
        ("--adam-beta2 0.95", "", ["--adam-beta2 0.95 and this run has 0.999"]),
        ("", "--decoupled-lr 1e-3", ["without --decoupled-lr and this run has --decoupled-lr"]),
        ("--qk-clip", "--qk-clip --qk-clip-alpha 0.4", ["--qk-clip-alpha 0.5 and this run has"]),
        ("--qk-clip-alpha 0.4", "", []),  # without effect
        ("", "--micro-batch-size 2 --global-batch-size 2", ["--global-batch-size"]),
    ],
)
def test_what_is_told(there, here, says):
    lines = [line for line in told(read(there), read(here)) if "the learning rate" not in line]
    assert len(lines) == len(says) and all(s in line for s, line in zip(says, lines, strict=True))


def test_a_flag_that_was_removed_is_told_where_it_changed_the_numbers():
    here = read()
    saved = here.flat() | {"optimizer.muon_use_syrk": True, "float8.fp8_margin": 0}
    saved |= {"parallel.wgrad_deferral_limit": 3, "extra.own": 3, "optimizer.a b": 1}
    state = {"config": saved, "numerics": same_run.NUMERICS}
    lines = same_run.lines(SimpleNamespace(directory="run/3", state=state), here, {})
    said = [line for line in lines if "removed" in line]
    assert said == ["run/3 was made with --muon-use-syrk True, a flag that has since been removed"]


def test_the_micro_batch_is_told_where_a_loss_depends_on_it():
    moe = "--num-experts 4 --moe-aux-loss-coeff 0.1 --global-batch-size 4"
    (line,) = told(read(moe), read(f"{moe} --micro-batch-size 2"))
    assert "--micro-batch-size 1 and this run has 2" in line
    whole = f"{moe} --moe-router-load-balancing-type seq_aux_loss"
    assert not told(read(whole), read(f"{whole} --micro-batch-size 2"))


def test_held_out_data_that_moved_is_not_other_data():
    def read_data(valid: str) -> Any:
        config = read()
        return replace(config, data=replace(config.data, valid_data_path=(valid,)))

    assert not told(read_data("here/v_text"), read_data("there/v_text"))
    (line,) = told(read_data("here/v_text"), read_data("here/w_text"))
    assert "--valid-data-path ['here/v_text'] and this run has ['here/w_text']" in line


def test_what_a_checkpoint_does_not_record_is_said_once():
    (line,) = told(read(), read("--adam-beta2 0.95"), config={})
    assert "run/3 does not record the flags of its run" in line and "learning rate" in line
    flat = {k: v for k, v in read().flat().items() if not k.startswith("optimizer.adam")}
    (line,) = told(read(), read("--adam-beta2 0.95"), config=flat)
    assert line == "run/3 does not record --adam-beta2: the value may have changed"
    assert not told(read(), read(), config=flat)
    flat = {k: v for k, v in read().flat().items() if not k.startswith(("fault.", "float8."))}
    assert not told(read(), read(), config=flat)


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, -1, True, 1 << 62])
def test_an_odd_record_ends_no_resume(value):
    for key in ("optimizer.lr", "optimizer.lr_decay_iters", "batch.global_batch_size",
                "batch.train_iters", "batch.step_batch_size_schedule"):  # fmt: skip
        flat = read().flat() | {key: value}
        told(read(), read("--lr 1e-4"), config=flat, iteration=3, consumed_samples=12)


def test_a_changed_model_file_is_told():
    config = read()
    config = replace(config, model=replace(config.model, model_file="mine.py"))
    state = {"config": config.flat(), "numerics": 1, "model_digest": "a"}
    found = SimpleNamespace(directory="run/3", state=state)
    (line,) = same_run.lines(found, config, {"model_digest": "b"})
    assert "--model-file mine.py has changed" in line
    assert not list(same_run.lines(found, config, {"model_digest": "a"}))
