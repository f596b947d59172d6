# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's file that is hostile gives one sentence, and prints nothing besides."""

import base64
import json
import os

import pytest

from training.data.tokenizer import build_tokenizer

MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
PADDING = {"direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0}
PADDING |= {"strategy": {"Fixed": 99_999_999_999}, "pad_token": "a"}
TRUNCATION = {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
LINE = [{"SpecialToken": {"id": "<s>", "type_id": 0}}]
TEMPLATE = {"type": "TemplateProcessing", "single": LINE, "pair": [], "special_tokens": {}}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
BYTES = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
HOSTILE = [
    ("HuggingFaceTokenizer", {"normalizer": CHARSMAP}, "charsmap"),  # these two panic in Rust
    ("HuggingFaceTokenizer", {"post_processor": TEMPLATE}, "no entry found"),
    ("HuggingFaceTokenizer", {"model": {**MODEL, "vocab": {"a": 4294967295}}}, "go up to 429496"),
    ("HuggingFaceTokenizer", {"model": {**MODEL, "vocab": {}}}, "go up to -1"),
    ("HuggingFaceTokenizer", {"model": {**MODEL, "merges": ["a z"]}}, "out of vocabulary"),
    ("HuggingFaceTokenizer", b'{"a":' * 100_000, "is not a tokenizer.json"),
    ("HuggingFaceTokenizer", b"\xff\xfe", "is not a tokenizer.json"),
    ("SentencePieceTokenizer", b"", "is not a SentencePiece model.* empty"),
    ("SentencePieceTokenizer", bytes(100), "is not a SentencePiece model"),
    ("TikTokenizer", BYTES + b"YWE= " + b"9" * 5000, "line 257"),
    ("TikTokenizer", BYTES + b"YWE= -1", "line 257"),
]


def write(path, content):
    if isinstance(content, dict):
        content = json.dumps({"version": "1.0", "added_tokens": [], "model": MODEL, **content})
        content = content.encode()
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(("kind", "content", "says"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_file_is_one_sentence(tmp_path, capfd, kind, content, says):
    path = write(tmp_path / "tokenizer.json", content)
    with pytest.raises(ValueError, match=f"(?s)tokenizer.json.*{says}") as caught:
        build_tokenizer(kind, path, None)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_no_document_is_padded_or_cut(tmp_path):
    """A padding of 400 GB would end the process; truncation would lose text without a word."""
    path = write(tmp_path / "tokenizer.json", {"padding": PADDING, "truncation": TRUNCATION})
    assert build_tokenizer("HuggingFaceTokenizer", path, None).encode("abab") == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "config", [b"[]", b"3", b'{"a":' * 9999, b'{"bos_token": "\\ud800"}', b"\xff", b"1e999"]
)
def test_a_hostile_config_beside_it_is_named(tmp_path, config):
    path = write(tmp_path / "tokenizer.json", {})
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(ValueError, match="tokenizer_config.json is not "):
        build_tokenizer("HuggingFaceTokenizer", path, None)


def test_numbers_that_nobody_reads_may_be_what_transformers_writes(tmp_path):
    """int(1e30) is its "no limit". The file keeps its place in the older digest, as it is."""
    path = write(tmp_path / "tokenizer.json", {})
    plain = build_tokenizer("HuggingFaceTokenizer", path, None).digest()
    config = {"model_max_length": int(1e30), "scale": float("inf"), "eos_token": "b"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", path, None)
    assert tokenizer.eod == 1 and tokenizer.digest() != plain
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": Infinity}')
    with pytest.raises(
        ValueError, match="tokenizer.json: transformers .* cannot read this tokenizer: .*eos_token"
    ):
        build_tokenizer("HuggingFaceTokenizer", path, None)


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "TikTokenizer", "GPT2BPETokenizer"])
def test_a_pipe_hangs_nobody(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe cannot be read: not a plain file"):
        build_tokenizer(kind, str(tmp_path / "pipe"), None)
