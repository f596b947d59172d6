# SPDX-License-Identifier: Apache-2.0
"""Each mistake in a file of --data-stages is one sentence: file, stage, value, rule."""

import json
from pathlib import Path
from typing import Any

import pytest

from training.data.indexed import IndexedWriter, token_dtype
from training.flags.parse import parse
from training.settings.config import UsageError

MODEL = """--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 16
    --tokenizer-type NullTokenizer --vocab-size 99 --lr 1e-3 --train-iters 100
    --global-batch-size 4 --device cpu"""
WEB = {"name": "web", "start_tokens": 0, "train_data_path": ["web"]}
LATER = {"name": "later", "start_tokens": "1K", "train_data_path": ["0.5", "web", "0.5", "code"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    for name in ("web", "code"):
        with IndexedWriter(str(made / name), token_dtype(99)) as writer:
            writer.add(range(90))
    return made


def read(folder: Path, monkeypatch: Any, content: Any, more: str = "") -> Any:
    """Parse a command line with a file of that content."""
    monkeypatch.chdir(folder)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "a.json").write_text(text)
    return parse([*MODEL.split(), "--data-stages", "a.json", *more.split()], 1)


def two(**changed: Any) -> dict[str, Any]:
    return {"stages": [WEB, LATER | changed]}


BAD: list[tuple[Any, str]] = [
    ("[1, 2", "--data-stages a.json is not JSON"),
    ([WEB], 'it must be an object with one key, "stages", a list of stages'),
    ({"stages": [WEB, 7]}, "stage 2 is 7: must be an object"),
    ({"stages": [WEB, {"name": "a"}]}, "stage 2 lacks start_tokens, train_data_path"),
    (two(name="a b"), "stage 2 has the name 'a b': must be of letters"),
    (two(name="web"), "two stages have the name 'web': names must be unique"),
    (two(lr=1e-4), "stage 'later' has 'lr': a stage may have name, start_tokens"),
    ({"stages": [WEB | {"start_tokens": 5}]}, "the first stage's start_tokens is 5: must be 0"),
    (two(start_tokens=0), "stage 'later' has start_tokens 0: must be above that of the stage"),
    (two(start_tokens=-1), "start_tokens is -1: must be a count such as 0, 300000 or 250B"),
    (two(train_data_path="web"), "train_data_path must be a list of strings"),
    (two(train_data_path=["0.5", "web", "code"]), "give either prefixes alone or pairs"),
    (two(train_data_path=["gone"]), "stage 'later': gone: there is no file gone.bin"),
    (two(seq_length=0), "stage 'later': --seq-length 0: must be a whole number >= 1"),
    (two(use_rope_scaling=1), "use_rope_scaling is 1: must be true or false"),
    (two(position_embedding_type="yarn", yarn_beta_fast=0.5), "stage 'later': --yarn-beta-fast"),
    (two(seq_length=32), "its stages differ in seq_length or rotary positions, so the run ends"),
    (
        {"stages": [WEB, LATER, LATER | {"name": "b", "start_tokens": 1020}]},
        "stage 'later' has no step of 64 tokens before stage 'b' starts at 1,020",
    ),
]


@pytest.mark.parametrize(("content", "sentence"), BAD, ids=[b[1] for b in BAD])
def test_a_mistake_is_one_sentence(folder, monkeypatch, content, sentence):
    with pytest.raises(UsageError) as mistake:
        read(folder, monkeypatch, content)
    said = str(mistake.value)
    assert said.startswith("--data-stages") and "a.json" in said and sentence in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--data-path web", "--data-stages and --data-path exclude each other"),
        ("--mock-data", "exclude each other"),
        ("--data-order megatron", "--data-order megatron has no stages"),
        ("--step-batch-size-schedule 0:4", "exclude each other"),
    ],
)
def test_flags_beside_it(folder, monkeypatch, more, sentence):
    with pytest.raises(UsageError, match=sentence):
        read(folder, monkeypatch, two(), more)


def test_an_evaluation_of_stages_of_two_lengths_needs_no_save(folder, monkeypatch):
    more = "--skip-train --load saved --valid-data-path web"
    assert read(folder, monkeypatch, two(seq_length=32), more).run.skip_train


def test_no_file(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=r"--data-stages gone.json: No such file"):
        parse([*MODEL.split(), "--data-stages", "gone.json"], 1)


def test_what_a_run_gets(folder, monkeypatch):
    save = "--save runs --load runs"
    config = read(folder, monkeypatch, two(seq_length=32, rotary_base=5e5), save)
    assert [s.first_sample for s in config.stages] == [0, 64] and config.model.seq_length == 16
    assert config.model.rotary_base == 10000 and config.model.max_position_embeddings == 16
    later = parse(config.command_line, 1, stage=1)
    assert (later.model.seq_length, later.model.rotary_base) == (32, 5e5)
    assert later.model.max_position_embeddings == 32 and later.stages == config.stages
    dry = read(folder, monkeypatch, two(seq_length=32, train_data_path=["gone"]), "--dry-run")
    assert dry.model.seq_length == 32  # of the longest rows
    with pytest.raises(UsageError, match="stage 'later': --seq-length 32 is longer than --max-pos"):
        read(folder, monkeypatch, two(seq_length=32), f"{save} --max-position-embeddings 16")
    same = read(folder, monkeypatch, two(), "--train-iters 5")
    assert any("the run ends before it, at sample 20" in note for note in same.notes)
    assert same.digest() != config.digest()
