# SPDX-License-Identifier: Apache-2.0
"""A --data-path that is no pair: the message says what is there and which command makes tokens."""

import gzip
import os
import re
import shlex

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tests.training.small_llama import SMALL, read
from tools import preprocess_data
from training.data.indexed import IndexedTokens, IndexedWriter
from training.settings.config import UsageError

BASE = SMALL.replace("--mock-data --dry-run", "").replace("--vocab-size 300", "")
TEXT = '{"text": "a b a"}\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vocabulary = {"a": 0, "b": 1, "</s>": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="b")).save("tokenizer.json")
    for name in ("my texts/deep", "pairs", "empty"):
        os.makedirs(name)
    for name in ("a.jsonl", "b.json", "my texts/deep/c.jsonl"):
        with open(name, "w") as file:
            file.write(TEXT)
    with gzip.open("d.jsonl.gz", "wt") as file:
        file.write(TEXT)
    for name in ("e.txt", "f.md"):
        with open(name, "w") as file:
            file.write("a b a")
    np.save("tokens.npy", np.arange(100))
    np.arange(100, dtype=np.uint16).tofile("raw.bin")
    for name in ("one", "two", "three_text_document", "four"):
        with IndexedWriter(f"pairs/{name}", np.dtype(np.uint16)) as out:
            out.add([0, 1, 0])


def said(path, flag="--data-path", tokenizer="HuggingFaceTokenizer"):
    """Return what is said of a path."""
    words = f"{flag} {shlex.quote(path)} --tokenizer-type {tokenizer}"
    words += " --tokenizer-model tokenizer.json" * (tokenizer == "HuggingFaceTokenizer")
    with pytest.raises(UsageError) as error:
        read(f"{words} --vocab-size 300", base=BASE)
    return str(error.value)


@pytest.mark.parametrize(
    "path, what",
    [
        ("a.jsonl", "it is text"),
        ("d.jsonl.gz", "it is text"),
        ("my texts", "it is text"),
        ("my texts/deep/c", "my texts/deep/c.jsonl is text"),
    ],
)
def test_the_command_makes_what_is_to_be_named(path, what):
    told = said(path)
    assert f"--data-path {path}: there is no file {path}.bin ({what}; `" in told
    command, pair = re.search(r"`(.*)` makes a pair from text; then give (.*)\)$", told).groups()
    python, tool, *words = shlex.split(command)
    assert (python, tool) == ("python", "tools/preprocess_data.py")
    words.remove("--append-eod")  # this tokenizer has no end of documents
    assert preprocess_data.main(words) in (0, None)
    (name,) = shlex.split(pair)
    assert IndexedTokens(name).count >= 1
    assert f"did you mean {name}?" in said(path) or path == "*.jsonl"


@pytest.mark.parametrize(
    "path, what",
    [
        ("tokens.npy", "its format is not read; `python tools/preprocess_data.py --input"),
        ("f.md", "its format is not read; `python tools/preprocess_data.py"),
        ("raw", "raw.bin alone does not say where a document begins; `python tools/prep"),
        ("raw.bin", "raw.bin alone does not say where a document begins; `python tools/"),
        ("empty", "it is a folder without pairs and text; `python tools/preprocess_data"),
        ("pairs", "it is a folder; the pairs in it are pairs/four, pairs/one, pairs/three_text"),
        ("pairs/three", "did you mean pairs/three_text_document?"),
        ("pairs/gone", "the pairs there are pairs/four, pairs/one, pairs/three_text_document and"),
        ("empty/gone", "tools/preprocess_data.py makes a .bin/.idx pair"),
    ],
)
def test_what_is_there_is_named(path, what):
    assert f"({what}" in said(path)
    given = "--train-data-path pairs/one --valid-data-path"
    assert said(path, given).startswith(f"--valid-data-path {path}: there is no file")


def test_a_run_without_a_tokenizer_of_text_is_told_which_flags_are_needed():
    words = "--tokenizer-type TYPE --tokenizer-model FILE` makes a pair"
    assert words in said("a.jsonl", tokenizer="NullTokenizer")
