# SPDX-License-Identifier: Apache-2.0
"""The time left, as the log says it, is the time that a simulated run still takes."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.flags.test_parse import SMALL, read
from training.faults.monitor import FailureMonitor
from training.run.log import Log
from training.run.start import log_of
from training.run.step import Step
from training.run.time_left import TimeLeft
from training.run.watch import Intervals

TOOK = {"step": 2.0, "validation": 300.0, "sample": 50.0, "save": 120.0, "test": 310.0}


class Clock:
    """Seconds that pass only where they are added."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(flags: str, total: int, tested: bool, monkeypatch: Any, capsys: Any) -> dict:
    """Run the order of the loop by a clock; return {iteration: (time left in the log, true)}."""
    length = "" if "--train-samples" in flags else f"--train-iters {total}"
    base = SMALL.replace("--train-iters 10", length)
    config, clock = read(flags, base=base), Clock()
    monkeypatch.setattr("training.run.start.model_profile", lambda *of: SimpleNamespace(flops=1.0))
    run = SimpleNamespace(
        config=config, grid=SimpleNamespace(rank=0, world_size=1), iteration=0,
        device=torch.device("cpu"), monitor=FailureMonitor(),
    )  # fmt: skip
    log: Log = log_of(run, None, total, tested)  # type: ignore[arg-type]
    log.left = TimeLeft(clock)
    said_at, size = dict[int, float](), config.batch.global_batch_size

    def spend(kind: str) -> None:
        with log.timing(kind):
            clock.now += TOOK[kind]

    intervals = Intervals(config, total)
    for i in range(1, total + 1):
        step = Step(i, (i - 1) * size, size, 1e-3, None)
        clock.now += TOOK["step"]
        log.step(
            iteration=i, consumed_samples=i * size, samples=size, tokens=8, seconds=TOOK["step"],
            loss=1.0, grad_norm=1.0, lr=1e-3,
        )  # fmt: skip
        said_at[i] = clock.now
        decided = intervals.after_step(step)
        for kind, due in (
            ("validation", decided.evaluate), ("sample", decided.sample), ("save", decided.save),
        ):  # fmt: skip
            if due:
                spend(kind)
    if tested:
        spend("test")
    lines = re.findall(r"(\d+)/\d+ .*ETA (?:(\d+):)?(\d+):(\d+)$", capsys.readouterr().out, re.M)
    said = {int(i): 3600 * int(h or 0) + 60 * int(m) + int(s) for i, h, m, s in lines}
    return {i: (said[i], clock.now - said_at[i]) for i in said}


@pytest.mark.parametrize(
    ("flags", "total", "tested"),
    [
        ("--eval-interval 20 --save-interval 30 --save {dir}", 100, False),
        ("--eval-interval 7 --sample-interval 10 --save {dir}", 95, True),
        ("--eval-interval 25 --save-interval 25 --train-samples 800 --save {dir}", 100, True),
    ],
    ids=["saves", "odd intervals, and a test set", "counted in samples"],
)
def test_the_time_left_counts_validation_samples_and_saves(
    flags: str, total: int, tested: bool, monkeypatch: Any, capsys: Any, tmp_path: Any
) -> None:
    base = flags.format(dir=tmp_path) + " --global-batch-size 8 --log-interval 1"
    found = simulate(base, total, tested, monkeypatch, capsys)
    assert found[1][0] == pytest.approx(TOOK["step"] * (total - 1), abs=1), "only steps are known"
    unmeasured = (TOOK["test"] - TOOK["validation"]) * tested
    if "--save-interval" not in flags:  # the only save is the last one, so it is not known before
        unmeasured += TOOK["save"]
    for i in range(31, total + 1):
        said, true = found[i]
        assert said == pytest.approx(true - unmeasured, abs=1), i


def test_a_kind_is_estimated_by_its_last_three_durations() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.step(1.0)
    for seconds in (100.0, 1.0, 2.0, 3.0):
        with left.measuring("save"):
            clock.now += seconds
    assert left.seconds(5, {"save": 2, "sample": 3}) == 5 + 2 * 2.0
