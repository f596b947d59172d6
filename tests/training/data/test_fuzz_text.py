# SPDX-License-Identifier: Apache-2.0
"""Tokenizers' files and lines of text changed at random: tokens, or a sentence with the file."""

import json
import random

import pytest

from tests.training.checkpoint.hostile import change, torn
from training.data.shards import documents
from training.data.tokenizer import build_tokenizer

SHORT, LONG = 40, 600
BYTES = [chr(i) for i in range(33, 127)]
TOKENIZER = {
    "version": "1.0",
    "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "padding": None,
    "added_tokens": [
        {"id": 95, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    ],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                      "use_regex": True},
    "post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A",
                       "type_id": 0}}], "pair": [], "special_tokens": {}},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "byte_fallback": False,
              "vocab": {**{c: i for i, c in enumerate(BYTES)}, "th": 94}, "merges": ["t h"]},
}  # fmt: skip


def tokenizer(path, rng):
    changed = change(TOKENIZER, rng) if rng.random() < 0.8 else TOKENIZER
    text = json.dumps(changed).encode()
    path.write_bytes(text if rng.random() < 0.8 else torn(text, rng))
    made = build_tokenizer("HuggingFaceTokenizer", str(path), None)
    try:
        ids = made.encode("the Tokens of a text, \u00e9 \U0001f600")
    except ValueError as error:
        assert str(error).startswith("HuggingFaceTokenizer: ")
        return
    assert all(0 <= i < made.vocab_size for i in ids)


def lines(path, rng):
    good = [{"text": "one"}, {"text": "two \u00e9", "more": [1, {"a": None}]}, {"text": ""}]
    raw = "\n".join(json.dumps(change(line, rng) if rng.random() < 0.3 else line) for line in good)
    path.write_bytes(raw.encode() if rng.random() < 0.5 else torn(raw.encode(), rng))
    assert all(text.encode() is not None for text in documents(path))


def check(directory, seeds):
    refused = 0
    for seed in seeds:
        for make, name in ((tokenizer, "tokenizer.json"), (lines, "lines.jsonl")):
            try:
                make(directory / name, random.Random(seed))
            except ValueError as error:
                refused += 1
                assert name in str(error) and "\n" not in str(error), (seed, error)
    assert len(seeds) / 4 < refused < 2 * len(seeds)


def test_changed_at_random(tmp_path, capfd):
    check(tmp_path, range(SHORT))
    assert capfd.readouterr().err == ""


@pytest.mark.prove
def test_many_changed_at_random(tmp_path):
    check(tmp_path, range(SHORT, SHORT + LONG))
