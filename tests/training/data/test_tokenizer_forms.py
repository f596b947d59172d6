# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face tokenizer gives the ids of transformers.AutoTokenizer, or says what it has not."""

import base64
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.data.test_hostile_tokenizers import PADDING, TRUNCATION
from tests.training.data.tokenizer_forms import (
    NEW,
    added,
    byte_level,
    difference,
    sentencepiece,
    token,
)
from training.data.tokenizer import HuggingFaceTokenizer, build_tokenizer


def written(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


PIECES = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
PIECES |= {"max_input_chars_per_word": 100}
PIECES["vocab"] = {w: i for i, w in enumerate("[PAD] [UNK] [CLS] [SEP] [MASK] hello wo".split())}
FORMS = {  # tokenizer.json, and the files beside it
    "a token of its own": (byte_level(), {"tokenizer_config": {"image_token": NEW}}),
    "older files": (
        byte_level(),
        {
            "tokenizer_config": {"eos_token": NEW, "additional_special_tokens": ["<|new|>"]},
            "added_tokens": {"<|new|>": 700, NEW: 701},
            "special_tokens_map": {"cls_token": token("<cls>")},
        },
    ),
    "decoder": (
        byte_level(),
        {
            "tokenizer_config": {
                "added_tokens_decoder": {"400": token(rstrip=True), "0": token("<|endoftext|>")},
                "eos_token": NEW,
            }
        },
    ),
    "text": (byte_level(), {"tokenizer_config": {"split_special_tokens": True, "eos_token": NEW}}),
    "padded": (byte_level(padding=PADDING, truncation=TRUNCATION), {"tokenizer_config": {}}),
    "by config.json": (byte_level(), {"config": {"model_type": "qwen2"}}),
    "of a fork": (byte_level(), {"config": {"model_type": "mine", "hidden_size": "odd"}}),
    "unknown class": (byte_level(), {"tokenizer_config": {"tokenizer_class": "MyTokenizerFast"}}),
    "gpt2": (byte_level(), {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}}),
    "bert": (
        byte_level(model=PIECES, added_tokens=[]),
        {"tokenizer_config": {"tokenizer_class": "BertTokenizerFast"}},
    ),
    "llama": (
        sentencepiece(),
        {"tokenizer_config": {"tokenizer_class": "LlamaTokenizer", "legacy": True}},
    ),
    "gemma": (
        sentencepiece(metaspace=True),
        {"tokenizer_config": {"tokenizer_class": "GemmaTokenizerFast"}},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    file, beside = FORMS[name]
    written(tmp_path, tokenizer=file, **beside)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = HuggingFaceTokenizer(str(tmp_path))
    assert not difference(ours, theirs)
    assert not difference(pickle.loads(pickle.dumps(ours)), theirs)  # as in another process


def test_a_token_that_only_another_file_knows_is_one(tmp_path: Path) -> None:
    """The next id is the library's, whatever id the file has."""
    written(tmp_path, tokenizer=byte_level())
    cut = HuggingFaceTokenizer(str(tmp_path))
    assert len(cut.encode(NEW)) > 4 and cut.eod == 0
    written(tmp_path, tokenizer_config={"added_tokens_decoder": {"900": token()}, "eos_token": NEW})
    whole = HuggingFaceTokenizer(str(tmp_path))
    assert whole.encode(f"low{NEW}") == [*cut.encode("low"), cut.vocab_size]
    assert (whole.eod, whole.vocab_size) == (cut.vocab_size, cut.vocab_size + 1)
    assert whole.decode(whole.encode(f"low{NEW}")) == f"low{NEW}"
    assert whole.digest() != cut.digest()
    assert len(whole.digests()) == 1 < len(cut.digests())  # no earlier version read it so


def test_the_end_of_a_document_is_a_special_token_and_no_piece(tmp_path: Path) -> None:
    file = byte_level()
    file["model"]["vocab"]["</s>"] = len(file["model"]["vocab"])
    assert HuggingFaceTokenizer(str(written(tmp_path, tokenizer=file))).eod == 0
    file["added_tokens"].append(added(file["model"]["vocab"]["</s>"], "</s>"))
    assert HuggingFaceTokenizer(str(written(tmp_path, tokenizer=file))).eod is None  # which one
    written(tmp_path, tokenizer_config={"eos_token": "</s>"})
    assert HuggingFaceTokenizer(str(tmp_path)).eod == file["model"]["vocab"]["</s>"]


DIGESTS = {  # of 3917fb2c: a resume compares them
    "bytes": "ids:0bd51d73417312df2fd28b887de9156d1c30c2fe124c53e2dafc703509de2d44",
    "llama": "ids:7e6ed27d0440ed41f12881e9a54bea0fe40cebec8bcb7ad065b9522872790fec",
    "neox": "ids:2ceb14d10628496a4719cfb403f5dd68ffccb8a6b839a0d66edd7f04e9acd05c",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_a_digest_keeps_its_value_where_the_ids_do(tmp_path: Path, name: str) -> None:
    decoder = {"0": token("<|endoftext|>")}
    configs = {"bytes": {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": decoder}}
    configs["llama"] = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}
    configs["neox"] = {"tokenizer_class": "GPTNeoXTokenizerFast", "pad_token": None}
    nfc = {"type": "NFC"}
    files = {"bytes": byte_level(), "neox": byte_level(normalizer=nfc)}
    files["llama"] = sentencepiece(metaspace=True)
    written(tmp_path, tokenizer=files[name], tokenizer_config=configs[name])
    assert DIGESTS[name] in HuggingFaceTokenizer(str(tmp_path)).digests()


@pytest.mark.parametrize("kind", ["GPT2", "GPTNeoX", "Qwen2", "Llama", "TokenizersBackend"])
def test_a_folder_that_is_saved_again_keeps_its_digest(tmp_path: Path, kind: str) -> None:
    """transformers writes a class's own rules into tokenizer.json, and tokens of other files."""
    transformers = pytest.importorskip("transformers")
    name = kind if kind == "TokenizersBackend" else f"{kind}Tokenizer"
    pieces, end = kind == "Llama", "</s>" if kind == "Llama" else "<|endoftext|>"
    file = sentencepiece() if pieces else byte_level()
    file["model"].pop("ignore_merges", None)
    config = {"tokenizer_class": name, "eos_token": end, "extra_special_tokens": [NEW]}
    written(tmp_path, tokenizer=file, tokenizer_config=config)
    before = HuggingFaceTokenizer(str(tmp_path))
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = HuggingFaceTokenizer(str(tmp_path / "again"))
    assert again.encode(f" low\n{NEW} a") == before.encode(f" low\n{NEW} a")
    assert (again.eod, again.digest()) == (before.eod, before.digest())
    written(tmp_path / "again", tokenizer_config=config | {"split_special_tokens": True})
    assert HuggingFaceTokenizer(str(tmp_path / "again")).digest() != before.digest()


def test_a_file_alone_needs_no_transformers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    written(tmp_path, tokenizer=byte_level(), config={"hidden_size": 64})
    assert HuggingFaceTokenizer(str(tmp_path)).eod == 0
    written(tmp_path, tokenizer_config={"eos_token": NEW}, special_tokens_map={})
    with pytest.raises(ValueError, match="json and special_tokens_map.json, is not"):
        HuggingFaceTokenizer(str(tmp_path))


REFUSED = [
    ({"tokenizer_class": "T5TokenizerFast"}, "tokenizer.json: transformers [0-9.]+ cannot read"),
    ({"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["a.B", None]}}, "auto_map .*never"),
    ({"added_tokens_decoder": ["x"]}, "tokenizer.json: transformers [0-9.]+ cannot read"),
    ({"eos_token": {"content": "x", "lstrip": 1}}, "eos_token has to be either str or AddedToken"),
    ({"extra_special_tokens": "x"}, "extra_special_tokens must be"),
    ({"fast_tokenizer_files": ["tokenizer.4.json"]}, "fast_tokenizer_files .*tokenizer.4.json"),
]


@pytest.mark.parametrize(("config", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_read_is_named(tmp_path: Path, config: dict[str, object], says: str) -> None:
    written(tmp_path, tokenizer=byte_level(), tokenizer_config=config)
    with pytest.raises(ValueError, match=says) as caught:
        HuggingFaceTokenizer(str(tmp_path))
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(tmp_path))


def test_dropout_is_refused_and_not_drawn(tmp_path: Path) -> None:
    file = byte_level()
    file["model"]["dropout"] = 0.1
    with pytest.raises(ValueError, match=r"tokenizer.json: its BPE has dropout 0.1"):
        HuggingFaceTokenizer(str(written(tmp_path, tokenizer=file)))
    file["model"]["dropout"] = 0.0  # no draw
    assert HuggingFaceTokenizer(str(written(tmp_path, tokenizer=file))).encode("hello")


def test_a_folder_without_a_tokenizer_json_says_what_it_has(tmp_path: Path) -> None:
    def says(match: str) -> None:
        with pytest.raises(ValueError, match=f"(?s)--tokenizer-model.*{match}") as caught:
            build_tokenizer("HuggingFaceTokenizer", str(tmp_path), None)
        assert "\n" not in str(caught.value)

    says("tokenizer.json cannot be read: No such file")
    written(tmp_path, vocab={"a": 0})
    says("no .*tokenizer.json, but vocab.json; vocab.json needs merges.txt, which is missing; tran")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    says(f"merges.txt and vocab.json; if it is GPT-2's, .*GPT2BPETokenizer --vocab-file {tmp_path}")
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    says(f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp_path}/tokenizer.model")
    written(tmp_path, added_tokens={"<pad>": 7})
    says("tokenizer.model reads it, but no token of added_tokens.json; ")
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    says(f"--tokenizer-type TikTokenizer --tokenizer-model {tmp_path}/tokenizer.model reads it")
    ranks = (b"%s %d\n" % (base64.b64encode(b"%d" % i), i) for i in range(200_000))  # Llama 4's
    (tmp_path / "tokenizer.model").write_bytes(b"".join(ranks))
    says("tokenizer.model and vocab.json; if it is GPT-2's, ")
    with pytest.raises(ValueError, match="it has 200,000 ranks, more than the 128,000 of Llama 3"):
        build_tokenizer("TikTokenizer", str(tmp_path / "tokenizer.model"), None)
