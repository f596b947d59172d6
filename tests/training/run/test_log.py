# SPDX-License-Identifier: Apache-2.0
"""The log is exact to the last bit, survives a kill, and says what is missing."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from training.run.log import Log
from training.run.output import flush
from training.run.peak_flops import measured_peak, peak_flops
from training.run.step import Step
from training.run.text import step_line

OFF = {
    "log_interval": 1,
    "log_params_norm": False,
    "log_json": None,
    "tensorboard_dir": None,
    "wandb_project": None,
    "wandb_exp_name": None,
}


def make(rank=0, total=4, world_size=2, **config):
    names = ("start_iteration", "total_samples", "on_line")
    more = {key: config.pop(key) for key in names if key in config}
    return Log(
        SimpleNamespace(**{**OFF, **config}),
        rank=rank,
        world_size=world_size,
        flops_per_token=1e6,
        dtype=torch.float32,
        device="cpu",
        total_iterations=total,
        **more,
    )


def step(log, iteration, **more):
    values = {"loss": 1 / 3, "grad_norm": math.pi, "lr": 1e-3, **more}
    log.step(
        iteration=iteration,
        consumed_samples=8 * iteration,
        samples=8,
        tokens=1000,
        seconds=0.5,
        data_wait_seconds=0.125,
        **values,
    )


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_holds_every_key_at_full_precision(tmp_path):
    path = tmp_path / "deep" / "log.json"
    with make(log_json=str(path)) as log:
        step(log, 1, params_norm=0.1 + 0.2, peak_memory_bytes=12345)
        log.validation(1, 2 / 3, name="validation")
    first, second = records(path)
    assert first.pop("mfu") == first["model_flops_per_second"] / log.peak
    assert first == {
        "iteration": 1,
        "consumed_samples": 8,
        "loss": 1 / 3,
        "grad_norm": math.pi,
        "lr": 1e-3,
        "tokens_per_second": 2000.0,
        "step_seconds": 0.5,
        "peak_memory_bytes": 12345,
        "data_wait_seconds": 0.125,
        "model_flops_per_second": 2e9,
        "params_norm": 0.1 + 0.2,
    }
    assert second == {"iteration": 1, "validation_loss": 2 / 3}


def test_line_names_everything_a_person_watches(capsys):
    with make(log_interval=2, total=4) as log:
        assert [log.at_interval(i) for i in (1, 2, 3, 4)] == [False, True, False, True]
        step(log, 1)
        step(log, 2)
    first, line = capsys.readouterr().out.splitlines()
    assert first.startswith("MFU: percent of 2 x ")
    assert "measured here with a float32 matmul" in first
    parts = ["iteration 2/4", "loss 0.3333", "lr 1.00e-3", "norm 3.14", "2.00k tokens/s"]
    assert line.split(" | ")[:5] == parts and line.endswith("% | ETA 0:01") and " | MFU " in line


RECORD = {"iteration": 7, "loss": 2.5, "lr": 3e-4, "grad_norm": 1.5, "tokens_per_second": 1.0}
LONG = {"iteration": 999_999, "loss": 12.3456, "grad_norm": 9999.0, "tokens_per_second": 123e6}


USUAL = {"grad_norm": 0.617, "tokens_per_second": 123_456.0, "mfu": 0.4123, "loss": 2.34567}
LINES = {
    "short": ({"mean_loss": 2.75}, 100, 60.0, "iteration   7/100 | loss 2.7500 | lr 3.00e-4 | "),
    "usual": (
        USUAL, 1000, 3 * 3600.0, "iteration    7/1000 | loss 2.3457 | lr 3.00e-4 | norm 0.62 | "
        "123k tokens/s | MFU 41% | ETA 3:00:00",
    ),
    "long": (LONG, 10**6, 3600.0, " 999999/1000000 | loss 12.3456 | lr 3.00e-4 | norm 9,999 | "),
    "longer": (LONG | {"params_norm": 1.5}, 10**6, 864e4, " 999999/1000000  loss 12.3456  lr "),
    "longest": (LONG | {"params_norm": 1.5e9}, 10**6, 8e12, " 999999/1000000  loss 12.3456  lr "),
    "nan": ({"loss": math.nan, "grad_norm": math.inf}, 9, 9.0, "iteration 7/9 | loss nan | lr "),
}  # fmt: skip


@pytest.mark.parametrize(("record", "total", "left", "starts"), LINES.values(), ids=LINES)
def test_a_line_has_100_columns_at_most(record, total, left, starts):
    line = step_line(RECORD | {"mfu": 1.0} | record, total, left)
    assert line.startswith(starts) and len(line) <= 100, (len(line), line)


def test_the_line_has_the_mean_of_its_steps_and_the_files_have_each(tmp_path, capsys):
    """After a resume, of the steps since; a step that is done again replaces what it was."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "log.json"

    def train(log, steps):
        for iteration, loss in steps:
            one = torch.tensor(float(loss))
            made = Step(iteration, 0, 8, 1e-3, None, loss=one, norm=one)
            step(log, iteration, **log.values(made, None))

    with make(log_json=str(path), tensorboard_dir=str(tmp_path), log_interval=4, total=8) as log:
        train(log, [(1, 10), (2, 20), (3, 90), (3, 30), (4, 40)])
    with make(log_json=str(path), log_interval=4, total=8, start_iteration=6) as log:
        train(log, [(7, 1), (8, 2)])
        log.finished(8)
    first, second = records(path)
    assert (first["loss"], first["mean_loss"]) == (40.0, 25.0)
    assert first["step_losses"] == [[1, 10.0], [2, 20.0], [3, 30.0], [4, 40.0]]
    assert (second["mean_loss"], second["step_losses"]) == (1.5, [[7, 1.0], [8, 2.0]])
    events = EventAccumulator(str(tmp_path)).Reload()
    each = [(e.step, e.value) for e in events.Scalars("loss")]
    assert each == [(1, 10), (2, 20), (3, 30), (4, 40)]
    lines = capsys.readouterr().out.splitlines()
    assert "iteration 4/8 | loss 25.0000" in lines[1] and "iteration 8/8 | loss 1.5000" in lines[3]
    said = r"finished: 8 iterations, loss 1.5000, \d:\d\d; not saved \(no --save\)"
    assert re.fullmatch(said, lines[4])


def test_a_run_that_has_nothing_to_do_says_so(capsys):
    with make(total=4, start_iteration=4) as log:
        log.finished(3)
        log.finished(4)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "nothing to do: iteration 4 of 4 is already done"
    ]
    with make(total=2, start_iteration=4) as log:  # --train-iters below the checkpoint's iteration
        log.finished(4)
    assert "iteration 4 of 2 is already done" in capsys.readouterr().out


def test_validation_has_bits_per_byte_where_a_token_is_text(tmp_path, capsys):
    """A loss of 2 ln 2 nats a token, of four bytes each, is half a bit a byte."""
    path = tmp_path / "log.json"
    with make(log_json=str(path)) as log:
        log.validation(1, 2 * math.log(2), 4.0)
        log.validation(1, 1.0, 0.0, name="test")
    first, second = capsys.readouterr().out.splitlines()[1:]
    said = "validation at iteration 1 | loss 1.3863 | perplexity 4.00"
    assert first == f"{said} | 0.500 bits per byte"
    assert second == "test at iteration 1 | loss 1.0000 | perplexity 2.72"
    assert [r.get("validation_bits_per_byte") for r in records(path)] == [pytest.approx(0.5), None]


def test_last_iteration_is_written_whatever_the_interval(tmp_path):
    path = tmp_path / "log.json"
    with make(log_json=str(path), log_interval=3, total=4) as log:
        for iteration in (1, 2, 3, 4):
            step(log, iteration, loss=float(iteration))
    assert [(r["iteration"], r["loss"]) for r in records(path)] == [(3, 3.0), (4, 4.0)]


def test_time_left_counts_samples_where_the_run_does(capsys):
    with make(total=99, total_samples=88) as log:
        step(log, 1)
    assert "ETA 0:05" in capsys.readouterr().out  # 10 steps of 8 samples, half a second each


def test_resume_appends_and_drops_only_a_torn_line(tmp_path):
    path = tmp_path / "log.json"
    with make(log_json=str(path)) as log:
        step(log, 1)
    content = path.read_bytes()
    path.write_bytes(content + b'{"iteration": 2, "lo')
    with make(log_json=str(path), start_iteration=1) as log:
        step(log, 2)
    assert path.read_bytes().startswith(content)
    assert [r["iteration"] for r in records(path)] == [1, 2]


def test_a_loss_that_is_not_finite_is_null_in_json_and_nan_on_the_line(tmp_path, capsys):
    path = tmp_path / "log.json"
    with make(log_json=str(path)) as log:
        step(log, 1, loss=math.nan)
    assert records(path)[0]["loss"] is None
    assert "loss nan" in capsys.readouterr().out


def test_the_first_line_ends_the_start():
    lines = []
    with make(log_interval=3, total=4, on_line=lambda: lines.append(log.interval.steps)) as log:
        for iteration in (1, 2, 3):
            step(log, iteration)
            assert len(lines) == (iteration == 3)


def test_other_ranks_write_nothing(tmp_path, capsys):
    path = tmp_path / "log.json"
    with make(rank=1, log_json=str(path), tensorboard_dir=str(tmp_path / "tb")) as log:
        step(log, 1)
        log.validation(1, 1.0)
        log.note("unheard")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is a Linux device")
def test_a_full_disk_ends_the_file_and_not_the_run(capsys):
    with make(log_json="/dev/full") as log:
        step(log, 1)
        step(log, 2)
    out = capsys.readouterr().out
    assert out.count("--log-json /dev/full: No space left on device") == 1
    assert "iteration 2/4" in out


@pytest.mark.prove
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is a Linux device")
def test_standard_output_on_a_full_disk_loses_lines_and_not_the_run(tmp_path):
    """The whole program: its last save is there, and its exit code says so."""
    root = Path(__file__).parents[3]
    flags = "--mock-data --vocab-size 100 --num-layers 1 --hidden-size 8 --ffn-hidden-size 8 "
    flags += "--num-attention-heads 1 "
    flags += f"--seq-length 8 --lr 1 --train-iters 2 --device cpu --save {tmp_path}/saved "
    flags += f"--tensorboard-dir {tmp_path}/tb --log-json /dev/full --log-interval 1"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "pretrain_llama.py", *flags.split()]
        done = subprocess.run(command, stdout=full, stderr=full, cwd=root, timeout=120)
    assert done.returncode == 0
    assert (tmp_path / "saved" / "step_00000002" / "manifest.json").exists()


def test_a_reader_that_leaves_its_pipe_ends_no_run(monkeypatch):
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with make() as log:
            step(log, 1)
            os.close(ours)
            step(log, 2)
        flush()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())


def test_no_standard_output_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with make() as log:
        step(log, 1)
    flush()


def test_an_error_of_wandb_ends_wandb(monkeypatch, capsys):
    def broken(*given, **named):
        raise RuntimeError("no network")

    run = SimpleNamespace(log=broken, finish=broken, define_metric=lambda *given, **named: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: run))
    with make(wandb_project="llamas") as log:
        step(log, 1)
        step(log, 2)
    out = capsys.readouterr().out
    assert out.count("--wandb-project llamas: no network; nothing more is written to it") == 1
    assert "iteration 2/4" in out


def test_logs_are_for_their_owner_alone(tmp_path):
    with make(log_json=str(tmp_path / "a.json"), tensorboard_dir=str(tmp_path / "tb")) as log:
        step(log, 1)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "tb").stat().st_mode & 0o777 == 0o700


def test_a_file_that_cannot_be_made_is_refused_by_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--log-json .*file/log.json: cannot be written"):
        make(log_json=str(tmp_path / "file" / "log.json"))


def test_tensorboard_hides_what_a_resumed_run_overwrites(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make(tensorboard_dir=str(tmp_path)) as log:
        for iteration in (1, 2, 3):
            step(log, iteration, loss=float(iteration))
    with make(tensorboard_dir=str(tmp_path), start_iteration=1) as log:
        step(log, 2, loss=20.0)
        log.validation(2, 0.5)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    assert [(e.step, e.value) for e in events.Scalars("validation_loss")] == [(2, 0.5)]
    assert "mfu" in events.Tags()["scalars"]


def test_wandb_gets_every_record(monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=calls.append, finish=lambda: calls.append("end"),
        define_metric=lambda name, **more: calls.append((name, more)),
    )  # fmt: skip
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **given: calls.append(given) or run)
    )
    with make(wandb_project="llamas", wandb_exp_name="first") as log:
        step(log, 1)
    assert calls[0] == {"project": "llamas", "name": "first", "config": None}
    assert calls[2] == ("*", {"step_metric": "iteration"})  # W&B's own step only grows
    assert calls[3]["iteration"] == 1 and calls[3]["loss"] == 1 / 3
    assert calls[4] == "end"


def test_cpu_peak_is_measured_and_says_so():
    peak, source = peak_flops(torch.device("cpu"), torch.bfloat16)
    assert "measured here with a bfloat16 matmul" in source
    assert peak > 1e8
    assert measured_peak(torch.device("cpu"), torch.float64, seconds=0.05) > 1e8
