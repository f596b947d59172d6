# SPDX-License-Identifier: Apache-2.0
"""The tokenizer gives back every text exactly, and a prompt may end in a space."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.train_tokenizer import Texts, check, lines, train
from training.run.waiting import Progress

ROOT = Path(__file__).parents[2]
CODE = "".join(
    f"class Name{n}(Base):\n    def method_{n}(self, value):\n        return value + {n}\n\n\n"
    for n in range(200)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "code.txt").write_text(CODE)
    assert train(Texts([folder / "code.txt"]), folder / "weft", vocab_size=350) == 350
    return folder / "weft.model"


@pytest.fixture(scope="module")
def processor(model):
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


@pytest.mark.parametrize(
    ("limit", "found"), [(5, ["abcde"]), (12, ["abcdefgh", "ijkl"]), (11, ["abcdefgh", "ij"])]
)
def test_a_line_is_cut_where_the_limit_of_bytes_ends(tmp_path, limit, found):
    """Also the first one, which may have all the text; a character of two bytes is not cut."""
    (tmp_path / "a.txt").write_text("abcdefgh\n\nij" + ("é" if limit == 11 else "kl") + "\nmore")
    assert [*lines(Texts([tmp_path / "a.txt"]), limit, Progress())] == found


@settings(max_examples=15, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0▁")))
def test_any_text_is_given_back(processor, text):
    assert processor.decode(processor.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["  two\n\n\n   three  \n", "\t\ttabs\r\n", "x" * 5000, " ", "\n    \n        a\n"]
)
def test_white_space_is_given_back(processor, text):
    assert processor.decode(processor.encode(text)) == text


def test_the_sign_for_a_space_alone_comes_back_as_one(processor):
    assert processor.decode(processor.encode("a▁b")) == "a b"


def test_code_costs_few_tokens_and_its_indentation_one(processor):
    pieces = processor.encode("\n        return value", out_type=str)
    assert pieces[0] == "\n" + "▁" * 8
    assert "".join(pieces[1:]) == "return▁value" and len(pieces) <= 4


def test_a_prompt_that_ends_in_a_space_is_a_prefix_of_its_continuation(processor):
    prompt, continued = processor.encode("def "), processor.encode("def method_1(self")
    assert continued[: len(prompt)] == prompt


def test_a_small_text_gets_a_smaller_vocabulary(tmp_path):
    (tmp_path / "a.txt").write_text("abc abd\n")
    texts = Texts([tmp_path / "a.txt"])
    size = train(texts, tmp_path / "t", vocab_size=2000)
    assert 256 < size < 300
    assert check(tmp_path / "t.model", texts) > 0


def test_a_vocabulary_that_is_too_small_says_what_is_needed(tmp_path):
    """nanoGPT's vocabulary is the 65 characters of its text; a space is always given back."""
    text = "To be, or not to be: that is the question;\n" * 9
    (tmp_path / "a.txt").write_text(text)
    texts = Texts([tmp_path / "a.txt"])
    with pytest.raises(ValueError, match=r"--vocab-size 65 is too small: 267 pieces") as caught:
        train(texts, tmp_path / "t", vocab_size=65)
    words = r"has (\d+) different character.*The least is (\d+); from (\d+) on"
    characters, least, every = map(int, re.search(words, str(caught.value)).groups())
    assert characters == len({*text} - {"\n"}) == every - 267
    with pytest.raises(ValueError, match=f"--vocab-size {least - 1} is too small"):
        train(texts, tmp_path / "t", least - 1)
    for size in (least, every):
        assert train(texts, tmp_path / "t", size) == size and check(tmp_path / "t.model", texts) > 0
    (tmp_path / "a.txt").write_text(" \n\t\n")
    with pytest.raises(ValueError, match="--input: the texts have no characters to learn from"):
        train(texts, tmp_path / "t", 300)


def test_training_twice_gives_the_same_file(model, tmp_path):
    train(Texts([model.parent / "code.txt"]), tmp_path / "again", vocab_size=350)
    first = sentencepiece.SentencePieceProcessor(model_file=str(model))
    second = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "again.model"))
    pieces = [[p.id_to_piece(i) for i in range(p.get_piece_size())] for p in (first, second)]
    assert pieces[0] == pieces[1]


def test_a_tokenizer_that_changes_a_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some words  with  runs\n of spaces\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "a.txt"),
        model_prefix=str(tmp_path / "bad"),
        vocab_size=30,
        model_type="bpe",
        minloglevel=2,
    )
    with pytest.raises(ValueError, match="--check: .* does not restore text 1 exactly"):
        check(tmp_path / "bad.model", Texts([tmp_path / "a.txt"]))


def run(*arguments):
    command = [sys.executable, "tools/train_tokenizer.py", *map(str, arguments)]
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_command_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": CODE}) + "\n")
    done = run(
        "--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "t", "--vocab-size", 350
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tokenizer: 350 pieces, ") and done.stdout.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "t.model"]


def test_fewer_pieces_than_were_asked_for_are_said(tmp_path):
    (tmp_path / "a.txt").write_text("abc abd\n")
    done = run("--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "t")
    assert done.returncode == 0, done.stderr
    assert re.match(r"tokenizer: 2\d\d pieces \(--vocab-size 2048, but the text", done.stdout)


@pytest.mark.parametrize("name", [b"caf\xe9", "café".encode()])
def test_a_prefix_may_have_any_bytes(tmp_path, name):
    """Also where Python takes a name in UTF-8 for others; SentencePiece opens no such name."""
    (tmp_path / "a.txt").write_text(CODE)
    place = os.path.join(os.fsencode(tmp_path), name)
    words = [sys.executable, "tools/train_tokenizer.py", "--input", tmp_path / "a.txt"]
    environment = {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [*words, "--output-prefix", place], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert os.path.getsize(place + b".model") > 1000


def test_a_missing_input_is_one_sentence(tmp_path):
    done = run("--input", tmp_path / "no.txt", "--output-prefix", tmp_path / "t")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "no.txt: cannot be read" in done.stderr


def test_a_bad_document_is_one_sentence_or_left_out(tmp_path):
    """SentencePiece wraps what its iterator raises in a traceback; the flag was not there."""
    rows = [json.dumps({"body": CODE}), '{"body": "broken', json.dumps({"body": CODE})]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    texts = Texts([tmp_path / "a.jsonl"], ("body",))
    with pytest.raises(ValueError, match="a.jsonl, line 2, byte .*skip leaves such documents out$"):
        train(texts, tmp_path / "t", 350)
    flags = ["--json-keys", "body", "--on-bad-document", "skip", "--vocab-size", 350]
    done = run("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "t", *flags)
    assert done.returncode == 0, done.stderr
    assert "1 document(s) left out: 1 not JSON (first: " in done.stdout
