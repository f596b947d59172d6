# SPDX-License-Identifier: Apache-2.0
"""Every tokenizer behind one interface, with small models that the tests make."""

import base64
import io
import json
import re

import pytest

from training.data.tokenizer import (
    TOKENIZER_TYPES,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    build_tokenizer,
)

TEXTS = [
    "hello world",
    "def f(x):\n    return x + 1\n",
    "  naïve façade: ☃ 東京 1234567",
    "",
    "\n\n \t",
]


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory):
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "def f(x): return x + 1", "one two three"] * 20),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def tiktoken_path(tmp_path_factory):
    """Write 256 bytes and a few merges as Llama 3 does."""
    tokens = [bytes([i]) for i in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w", b"12"]
    lines = [base64.b64encode(token).decode() + f" {i}\n" for i, token in enumerate(tokens)]
    path = tmp_path_factory.mktemp("tik") / "tokenizer.model"
    path.write_text("".join(lines))
    return str(path)


def make_tokenizer_json(directory, bos="<s>", eod="</s>", adds_bos=False):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    model = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(bos, special=True), AddedToken(eod, special=True)])
    if adds_bos:
        model.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, 256)]
        )
    model.save(str(directory / "tokenizer.json"))
    return str(directory / "tokenizer.json")


def test_sentencepiece(sentencepiece_path):
    tokenizer = build_tokenizer("SentencePieceTokenizer", sentencepiece_path, None)
    assert (tokenizer.bos, tokenizer.eod) == (1, 2) and not tokenizer.starts_with_bos
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and max(ids, default=0) < tokenizer.vocab_size
        assert tokenizer.encode(text, bos=True) == [1, *ids]
    for name in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):  # as in Megatron, since Core 0.15
        other = build_tokenizer(name, sentencepiece_path, None)
        assert other.name == name and not other.starts_with_bos
        assert other.encode("hello") == tokenizer.encode("hello")
        assert other.digest() == tokenizer.digest()


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "TikTokenizer"])
def test_the_padding_of_a_vocabulary_has_no_text(sentencepiece_path, tiktoken_path, kind):
    """A model may draw it, as its vocabulary may be larger (--vocab-size)."""
    path = tiktoken_path if kind == "TikTokenizer" else sentencepiece_path
    tokenizer = build_tokenizer(kind, path, None)
    ids = tokenizer.encode("hello")
    assert tokenizer.decode([tokenizer.vocab_size, *ids, tokenizer.vocab_size + 7]) == "hello"


def test_sentencepiece_without_control_tokens(tmp_path):
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d"] * 9),
        model_writer=model,
        vocab_size=10,
        model_type="bpe",
        bos_id=-1,
        eos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "m").write_bytes(model.getvalue())
    tokenizer = SentencePieceTokenizer(str(tmp_path / "m"))
    assert tokenizer.bos is None and tokenizer.eod is None
    with pytest.raises(ValueError, match="this SentencePieceTokenizer has no beginning-of-text"):
        tokenizer.encode("a", bos=True)


def test_tiktoken_of_llama3(tiktoken_path):
    tokenizer = build_tokenizer("TikTokenizer", tiktoken_path, None)
    assert tokenizer.vocab_size == 262 + 256
    assert (tokenizer.bos, tokenizer.eod) == (262, 263) and not tokenizer.starts_with_bos
    assert tokenizer.encode("hello world", bos=True) == [262, 259, 260, *b"orld"]
    assert tokenizer.encode("12345") == [261, *b"345"]  # three digits at a time: 123, 45
    assert tokenizer.decode([262 + 9]) == "<|eot_id|>" and len(set(tokenizer.SPECIAL)) == 256
    assert tokenizer.decode([262 + 255]) == "<|reserved_special_token_250|>"
    assert tokenizer.encode("<|eot_id|>") == list(b"<|eot_id|>")  # text is text
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["a" * 60_000, " " * 60_000, "ab " * 200_000, "é" * 450_001])
def test_tiktoken_survives_what_its_regex_does_not(tiktoken_path, text):
    tokenizer = TikTokenizer(tiktoken_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tiktoken_cuts_runs_where_llama3_does(tiktoken_path):
    """A run of exactly 25,000 stands; its 25,001st character starts a new piece."""
    from training.data.tik_tokenizer import _bounded_pieces

    assert list(_bounded_pieces("x" * 25_000 + " y")) == ["x" * 25_000 + " y"]
    text = "a " + "x" * 50_001 + "  " + " " * 25_000 + "z"
    pieces = list(_bounded_pieces(text))
    assert "".join(pieces) == text
    assert list(map(len, pieces)) == [25_002, 25_000, 25_001, 3]


@pytest.mark.parametrize(
    ("line", "content", "match"),
    [
        (5, "not base64 5", "line 6: a tiktoken file has"),
        (5, "YQ==", "line 6: a tiktoken file has"),
        (5, "YQ== five", "line 6: a tiktoken file has"),
        (5, "YWFhYQ== 7", "line 6: rank 7 is out of order"),
        (7, "AA== 7", "line 8: rank 7 is out of order or its token is there twice"),
        (7, "YWFhYQ== 7", "not every single byte"),
    ],
)
def test_a_bad_tiktoken_file_is_refused(tmp_path, tiktoken_path, line, content, match):
    with open(tiktoken_path) as file:
        lines = file.read().splitlines()
    lines[line] = content
    path = tmp_path / "tokenizer.model"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=f"--tokenizer-model {path}.*{match}"):
        TikTokenizer(str(path))


@pytest.mark.parametrize("adds_bos", [False, True])
def test_hugging_face(tmp_path, adds_bos):
    path = make_tokenizer_json(tmp_path, adds_bos=adds_bos)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", path, None)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (258, 256, 257)
    assert tokenizer.starts_with_bos == adds_bos
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) == len(text.encode())
        assert tokenizer.encode(text, bos=True) == [256, *ids]
    same = HuggingFaceTokenizer(str(tmp_path))
    assert same.encode("hello") == tokenizer.encode("hello") and same.digest() == tokenizer.digest()


def test_hugging_face_config_names_the_special_tokens(tmp_path):
    path = make_tokenizer_json(tmp_path, bos="<go>", eod="<stop>")
    bare = HuggingFaceTokenizer(path)
    assert bare.bos is None and bare.eod is None
    config = {"bos_token": "<go>", "eos_token": {"__type": "AddedToken", "content": "<stop>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    configured = HuggingFaceTokenizer(path)
    assert (configured.bos, configured.eod) == (256, 257) and configured.digest() != bare.digest()
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="tokenizer_config.json is not a JSON object"):
        HuggingFaceTokenizer(path)


def test_null():
    tokenizer = build_tokenizer("NullTokenizer", None, 100)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (100, None, 99)
    assert tokenizer.encode("5 98\n0  99") == [5, 98, 0, 99]
    assert tokenizer.decode([5, 99]) == "5 99"
    assert tokenizer.digest() == NullTokenizer(100).digest() != NullTokenizer(101).digest()
    for text in ("-1", "100", "one", "٣", "99999999999999999999999999"):
        with pytest.raises(ValueError, match=re.escape(f"numbers below 100, not {text!r}")):
            tokenizer.encode(f"3 {text}")


def test_what_a_user_is_told(tmp_path, sentencepiece_path, tiktoken_path):
    def refused(match, *flags):
        with pytest.raises(ValueError, match=match):
            build_tokenizer(*flags)

    refused("--tokenizer-type None is none of SentencePiece", None, None, None)
    refused("--tokenizer-type BertWordPiece is none of", "BertWordPiece", "x", None)
    refused("NullTokenizer needs --vocab-size", "NullTokenizer", None, None)
    refused("NullTokenizer needs --vocab-size", "NullTokenizer", None, -5)
    for kind in TOKENIZER_TYPES[:-1]:
        refused(f"--tokenizer-type {kind} needs --tokenizer-model", kind, None, None)
        refused("cannot be read: No such file", kind, str(tmp_path / "nothing"), None)
    (tmp_path / "empty").write_bytes(b"")
    for wrong in (tiktoken_path, str(tmp_path / "empty")):
        refused("is not a SentencePiece model", "SentencePieceTokenizer", wrong, None)
        refused("is not a tokenizer.json", "HuggingFaceTokenizer", wrong, None)
    refused("line 1: a tiktoken file", "TikTokenizer", sentencepiece_path, None)
    refused("cannot be read: Is a directory", "SentencePieceTokenizer", str(tmp_path), None)
    refused("tokenizer.json cannot be read", "HuggingFaceTokenizer", str(tmp_path), None)
