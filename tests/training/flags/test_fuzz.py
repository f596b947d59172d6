# SPDX-License-Identifier: Apache-2.0
"""Whatever the flags, the answer is a plan, a start, or one sentence: no traceback, no silence."""

import re
from pathlib import Path

import pytest

import pretrain_llama
from tests.training.flags.flag_fuzz import GOOD, answer, build, draw

SHORT, LONG, BLOCK = 30, 200, 100


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


NAMED = [
    (["--seq-length=--"], "--seq-length=--: -- is not a value"),
    (["--kv-channels", "9223372036854775808"], "--kv-channels 9223372036854775808: must be"),
    (["--train-iters", "1e30"], "--train-iters 1e30: must be a whole number"),
    (["--train-iters", "9223372036854775808"], "that fits into 64 bits"),
    (["--num-workers", "1000000"], "--num-workers 1000000: must be .* at most 256"),
    (["--seed", "1_000"], "--seed 1_000: must be a whole number"),
    (["--lr", "\u0663"], "--lr \u0663: must be a number"),
    (["--global-batch-size", "2000000000"], "forwards of pipeline stages in one step"),
    (["--seq-length", "8388608", "--micro-batch-size", "64"], "tokens: must be at most"),
]


@pytest.mark.parametrize(("words", "says"), NAMED, ids=range(len(NAMED)))
def test_what_an_attack_found(words: list[str], says: str, place: Path, capsys) -> None:
    given = [word for pair in GOOD.items() if pair[0] not in words[0] for word in pair]
    assert pretrain_llama.main([*given, *words, "--dry-run"]) == 2
    assert re.search(says, capsys.readouterr().err)
