# SPDX-License-Identifier: Apache-2.0
"""Whatever the flags, the answer is a plan, a start, or one sentence: no traceback, no silence."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import pretrain_llama
from tests.training.flags.flag_fuzz import GOOD, answer, build, draw, judge

SHORT, LONG, BLOCK = 30, 800, 100


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fuzz")
    build(place)
    return place


@pytest.fixture
def place(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand among the files; a run that is accepted ends where it would build the model."""
    monkeypatch.chdir(files)
    real = pretrain_llama.build

    def build_recorded_ones(config, grid, device, monitor):
        return real(config, grid, device, monitor) if device.type == "meta" else None

    monkeypatch.setattr(pretrain_llama, "build", build_recorded_ones)
    monkeypatch.setattr(pretrain_llama, "work", lambda *args: None)
    return files


def check(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {}
    for seed in seeds:
        words, environment = draw(seed)
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        if what := answer(words):
            wrong[seed] = f"{words}\n{what}"
    assert not wrong, "\n\n".join(f"seed {seed}: {what}" for seed, what in wrong.items())


def test_flags_drawn_at_random(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(range(SHORT), monkeypatch)


@pytest.mark.prove
@pytest.mark.parametrize("first", range(SHORT, SHORT + LONG, BLOCK))
def test_many_flags_drawn_at_random(
    first: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(range(first, first + BLOCK), monkeypatch)


def test_enough_draws_are_accepted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzz whose draws are all refused at the first flag would look at little."""
    begun = []
    monkeypatch.setattr(pretrain_llama, "prepare", lambda *args: begun.append(1) or 1 / 0)
    room = SimpleNamespace(report=lambda *args: begun.append(1) or "", draw=lambda *args: "")
    monkeypatch.setattr(pretrain_llama, "forecast", lambda file: room)
    seeds = 3 * SHORT  # one in six is accepted, so that a new flag's other draws change little
    for seed in range(seeds):
        words, environment = draw(seed)
        monkeypatch.setenv("WORLD_SIZE", environment["WORLD_SIZE"])
        answer(words)
    assert seeds // 20 < len(begun) < seeds


def test_the_judge_sees_what_is_wrong() -> None:
    def escape() -> int:
        print("\x1b[31m")
        return 0

    def spin() -> int:
        while True:
            os.getpid()

    def silent() -> int:
        return 2

    assert "a traceback" in judge(lambda: 1 // 0, (0, 2))
    assert "it prints '\\x1b'" in judge(escape, (0, 2))
    assert "not a sentence" in judge(silent, (0, 2))
    assert "code 7" in judge(lambda: 7, (0, 2))
    assert "no answer" in judge(spin, (0, 2), seconds=1)


NAMED = [
    (["--seq-length=--"], "--seq-length=--: -- is not a value"),
    (["--kv-channels", "9223372036854775808"], "--kv-channels 9223372036854775808: must be"),
    (["--train-iters", "1e30"], "--train-iters 1e30: must be a whole number"),
    (["--train-iters", "9223372036854775808"], "that fits into 64 bits"),
    (["--num-workers", "1000000"], "--num-workers 1000000: must be .* at most 256"),
    (["--seed", "1_000"], "--seed 1_000: must be a whole number"),
    (["--lr", "\u0663"], "--lr \u0663: must be a number"),
    (["--global-batch-size", "2000000000"], "forwards of a stage in one step"),
    (["--seq-length", "8388608", "--micro-batch-size", "64"], "tokens at a time"),
]


@pytest.mark.parametrize(("words", "says"), NAMED, ids=range(len(NAMED)))
def test_what_an_attack_found(words: list[str], says: str, place: Path, capsys) -> None:
    given = [word for pair in GOOD.items() if pair[0] not in words[0] for word in pair]
    assert pretrain_llama.main([*given, *words, "--dry-run"]) == 2
    assert re.search(says, capsys.readouterr().err)
