# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face tokenizer gives the ids of transformers.AutoTokenizer, or says what it has not."""

import base64
import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.sampling import sampled
from tests.training.data.tokenizer_forms import (
    NEW,
    added,
    byte_level,
    play,
    sentencepiece,
    token,
)
from training.data.hf_classes import class_of
from training.data.tokenizer import HuggingFaceTokenizer, build_tokenizer


def written(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("every", sampled((151, 1), 2))
def test_no_form_is_read_in_another_way(tmp_path: Path, every: int) -> None:
    """`python -m tests.training.data.tokenizer_forms` prints how many forms these are."""
    pytest.importorskip("transformers")
    counts, _, wrong = play(tmp_path, every)
    assert not wrong
    assert counts["right"] > 0.7 * counts.total() > 50


def test_a_token_that_only_another_file_knows_is_one(tmp_path: Path) -> None:
    """The next id is the library's, whatever id the file has; without transformers too."""
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


def test_a_model_type_stands_for_the_class_that_transformers_has() -> None:
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    if importlib.metadata.version("transformers") != "5.24.0":
        pytest.skip("the table is that of transformers 5.24.0")
    backends = ("TokenizersBackend", "ParakeetTokenizer")  # as tokenizer.json says
    for kind, stands in auto.TOKENIZER_MAPPING_NAMES.items():
        name = str(stands or "TokenizersBackend").removesuffix("Fast")
        try:
            found = class_of({}, {"model_type": kind}, False, "here")
            assert found == ("" if name in backends else name), kind
        except ValueError as error:
            assert f"here: tokenizer_class {name} makes transformers" in str(error), kind
    for kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
        name = str(auto.TOKENIZER_MAPPING_NAMES[kind]).removesuffix("Fast")
        if name != "Siglip2Tokenizer":  # refused
            found = class_of({"tokenizer_class": "Mine"}, {"model_type": kind}, False, "here")
            assert found == ("" if name in backends else name), kind


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_what_a_refusal_says_is_enough(tmp_path: Path, kind: str) -> None:
    """A Qwen2 with a WordLevel of its own: for its config.json transformers heeds no class."""
    words = {"type": "WordLevel", "vocab": {"<unk>": 0, "low": 1}, "unk_token": "<unk>"}
    file = {"version": "1.0", "added_tokens": [], "model": words}
    written(tmp_path, tokenizer=file, config={"model_type": kind})
    written(tmp_path, tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"})
    apart = r"Fast, in a folder without this config.json \(model_type qwen2\), "
    with pytest.raises(ValueError, match=apart if kind == "qwen2" else "TokenizerFast to use tok"):
        HuggingFaceTokenizer(str(tmp_path))
    written(tmp_path, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    if kind == "qwen2":
        (tmp_path / "config.json").unlink()
    assert HuggingFaceTokenizer(str(tmp_path)).encode("low") == [1]


REFUSED = [
    ({"tokenizer_class": "BertTokenizerFast"}, "tokenizer_config.json: tokenizer_class BertToken"),
    ({"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["a.B", None]}}, "auto_map .*never"),
    ({"added_tokens_decoder": {"7": "x"}}, "tokenizer_config.json: added_tokens_decoder: 7 is not"),
    ({"added_tokens_decoder": ["x"]}, "added_tokens_decoder is not an object"),
    ({"eos_token": {"content": "x", "lstrip": 1}}, "tokenizer_config.json: eos_token is neither"),
    ({"extra_special_tokens": "x"}, "extra_special_tokens is neither a list nor an object"),
    ({"fast_tokenizer_files": ["tokenizer.4.json"]}, "fast_tokenizer_files .*tokenizer.4.json"),
]


@pytest.mark.parametrize(("config", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_read_is_named(tmp_path: Path, config: dict[str, object], says: str) -> None:
    written(tmp_path, tokenizer=byte_level(), tokenizer_config=config)
    with pytest.raises(ValueError, match=says) as caught:
        HuggingFaceTokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


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
