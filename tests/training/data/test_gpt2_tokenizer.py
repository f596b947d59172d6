# SPDX-License-Identifier: Apache-2.0
"""GPT-2's BPE from vocab.json and merges.txt: the ids of transformers, and what is refused."""

import json

import pytest

from training.data.tokenizer import build_tokenizer

TEXTS = ("low lower", " the  lowest\nnewest", "naïve café 12345 №", "it's we'll\t\t", "", "字 🙂")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A BPE of 400 entries as GPT-2 stores it: train it on the spot, nothing is downloaded."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("gpt2")
    model = tokenizers.ByteLevelBPETokenizer()
    corpus = ["low lower lowest the new newer newest", "it's 12345 café"] * 50
    model.train_from_iterator(corpus, 400, special_tokens=["<|endoftext|>"])
    model.save_model(str(folder))
    return folder


def build(folder, **files):
    return build_tokenizer("GPT2BPETokenizer", str(folder / "vocab.json"), None, **files)


def test_the_ids_are_those_of_transformers(files):
    transformers = pytest.importorskip("transformers")
    tokenizer = build(files, merge_file=str(files / "merges.txt"))
    theirs = transformers.GPT2Tokenizer.from_pretrained(str(files))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(theirs)
    assert tokenizer.eod == theirs.convert_tokens_to_ids("<|endoftext|>")


def test_the_merges_are_found_beside_the_vocabulary(files):
    assert build(files).digest() == build(files, merge_file=str(files / "merges.txt")).digest()
    with pytest.raises(ValueError, match="has no beginning-of-text token"):
        build(files).encode("low", bos=True)


def test_what_is_not_gpt2s_is_named(files, tmp_path):
    with pytest.raises(ValueError, match="--vocab-file .*vocab.json cannot be read"):
        build(tmp_path)
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(ValueError, match="--merge-file .*merges.txt cannot be read"):
        build(tmp_path)
    (tmp_path / "merges.txt").write_bytes((files / "merges.txt").read_bytes())
    with pytest.raises(ValueError, match="are not GPT-2's vocab.json and merges.txt"):
        build(tmp_path)
    vocabulary = json.loads((files / "vocab.json").read_text())
    del vocabulary["<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ValueError, match="has no <|endoftext|>, which ends a document"):
        build(tmp_path)
