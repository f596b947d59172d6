# SPDX-License-Identifier: Apache-2.0
"""The data of stages: what goes on where it was, over blends, lengths, layouts and epochs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sample_ledger import main
from training.data.build import build_datasets
from training.data.indexed import IndexedWriter, token_dtype
from training.data.stage_datasets import Staged
from training.data.tokenizer import build_tokenizer
from training.flags.parse import parse
from training.settings.stages import stage_at

DOCUMENTS = {"web": 300, "code": 120, "books": 60}  # of 1 to 39 tokens; no token comes twice
FLAGS = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --device cpu --seq-length 8
    --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 20001 --train-iters 150
    --global-batch-size 4 --ffn-hidden-size 16"""
SAME = [
    {"name": "web", "start_tokens": 0, "train_data_path": ["0.7", "web", "0.3", "code"]},
    {"name": "books", "start_tokens": 2000, "train_data_path": ["0.6", "web", "0.4", "books"]},
    {"name": "all", "start_tokens": 3001, "train_data_path": ["code", "web"]},
]
LONGER = [*SAME[:2], SAME[2] | {"seq_length": 24, "rotary_base": 5e5}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the three data sets."""
    made, token = tmp_path_factory.mktemp("data"), 0
    for name, documents in DOCUMENTS.items():
        with IndexedWriter(str(made / name), token_dtype(20001)) as writer:
            for i in range(documents):
                writer.add(range(token, token + i * 7 % 39 + 1))
                token += i * 7 % 39 + 1
    assert token < 20001
    return made


def flags(folder: Path, stages: list[dict[str, Any]], *more: str) -> list[str]:
    """Write the file of stages, its data sets in `folder`; return the flags of a run with it."""
    names = {name: str(folder / name) for name in DOCUMENTS}
    made = [
        stage | {"train_data_path": [names.get(word, word) for word in stage["train_data_path"]]}
        for stage in stages
    ]
    file = folder / "stages.json"
    file.write_text(json.dumps({"stages": made}))
    save = ["--save", str(folder / "runs"), "--load", str(folder / "runs")]
    return [*FLAGS.split(), "--data-stages", str(file), *save, *more]


def data_of(argv: list[str]) -> Staged:
    """Return the training data of a run."""
    tokenizer = build_tokenizer("NullTokenizer", None, 20001)
    data = build_datasets(parse(argv, 1), tokenizer, lambda line: None)["train"]
    assert isinstance(data, Staged)
    return data


def read(data: Staged, first: int, last: int) -> Counter[int]:
    """Count the tokens that samples first to last - 1 train on."""
    found: Counter[int] = Counter()
    for i in range(first, last):
        found.update(data.sample(i)[:-1].tolist())
    return found


def test_a_data_set_goes_on_where_the_stage_before_left_it(folder):
    data = data_of(flags(folder, SAME))
    first, second = (stage.first_sample for stage in data.stages[1:])
    assert (first, second) == (252, 376)  # the first multiple of a batch at 2,000 and 3,001 tokens
    seen = read(data, 0, second)
    web = seen.total() - sum(seen[t] for t in seen if t >= 6000)
    assert web > 1800 and max(seen.values()) == 1  # nothing comes twice within an epoch
    assert data.starts[1] == [round(252 * 0.7), 0]
    again = read(data_of(flags(folder, SAME[:1])), 0, first)
    assert again == read(data, 0, first)  # what is to come changes nothing of what is
    over = read(data, second, second + 800)
    assert max((seen + over).values()) == 2  # then come next epochs
    for i in (0, first - 1, first, second, second + 9):
        stage = stage_at(data.stages, i)
        dataset, document, offset = data.origin(i)
        prefix = list(DOCUMENTS)[{0: 0, 1: 1, 2: 2}[dataset]]
        assert (stage > 0 or prefix != "books") and str(folder / prefix) in data.describe(i)
        token = data.sample(i)[0]
        assert f"document {document}, from token {offset} on" in data.describe(i)
        assert 0 <= token < 20001


def test_another_length_goes_on_behind_as_many_tokens(folder):
    data = data_of(flags(folder, LONGER))
    first, second = (stage.first_sample for stage in data.stages[1:])
    taken = [data.parts[0].counts(first), data.parts[1].counts(second - first)]
    web, code = 8 * (taken[0][0] + taken[1][0]), 8 * taken[0][1]
    assert data.starts[2] == [-(-code // 24), -(-web // 24)]
    assert len(data.sample(second)) == 25 and len(data.sample(second - 1)) == 9
    assert data.seq_length == 8  # of this process


@pytest.mark.parametrize("n", [0, 1, 7, 100, 12345])
def test_counts_are_those_of_the_samples(folder, n):
    blend = data_of(flags(folder, SAME)).parts[2]
    found, _ = blend.locate_all(np.arange(n))
    assert blend.counts(n) == [int((found == i).sum()) for i in range(2)]


def test_the_ledger_knows_stages(folder, monkeypatch, capsys):
    lines = []
    for world in (1, 2):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        argv = flags(folder, LONGER, "--step-batch-size-schedule", "0:4 2500:8")
        argv = [w for w in argv if w not in ("--global-batch-size", "4")]
        assert main(["--first-step", "60", "--steps", "40", "--", *argv]) == 0
        out, err = capsys.readouterr()
        assert not err
        lines.append(out.splitlines())
    assert lines[0] == lines[1] and len(set(lines[0])) == 40
    assert [line.split()[-1] for line in lines[0]] == 4 * ["web"] + 23 * ["books"] + 13 * ["all"]
    assert "batch 4 " in lines[0][0] and "batch 8 " in lines[0][-1]
