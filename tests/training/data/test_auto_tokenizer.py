# SPDX-License-Identifier: Apache-2.0
"""transformers.AutoTokenizer loads an exported folder and gives the ids that the run trained on."""

import json
from pathlib import Path

import pytest

from tools.train_tokenizer import Texts, train
from training.data.auto_tokenizer import auto_tokenizer
from training.data.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[3]
ODD = ["", " ", "\n", "\n     z", "  lead", "x ", "a\tb", "é 中文 😀 ÿ", "\n\n\n    x:\n\n", "<s"]
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in {**files, "config.json": json.dumps(CONFIG).encode()}.items():
        (folder / name).write_bytes(content)
    return folder


def loaded(folder: Path) -> object:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_a_sentencepiece_model_of_ours_has_the_same_ids(tmp_path: Path) -> None:
    """transformers' own conversion gives a newline with its indentation other ids."""
    code = "".join(path.read_text() for path in sorted((ROOT / "tools").glob("*.py")))
    (tmp_path / "a.txt").write_text((ROOT / "README.md").read_text() + code)
    train(Texts([tmp_path / "a.txt"]), tmp_path / "t", 700)
    ours = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "t.model"), None)
    model = {"tokenizer.model": (tmp_path / "t.model").read_bytes()}
    more = auto_tokenizer(model, ours)
    assert sorted(more) == ["tokenizer.json", "tokenizer_config.json"]
    theirs = loaded(written(tmp_path / "hf", model | more))
    texts = [*ODD, (ROOT / "README.md").read_text(), (ROOT / "tests/test_run.py").read_text()]
    for text in texts:
        assert theirs.encode(text) == ours.encode(text), text[:30]
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eod
    assert theirs.bos_token_id == ours.bos
    again = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "hf"), None)
    assert (again.eod, again.vocab_size) == (ours.eod, ours.vocab_size)
    assert auto_tokenizer({**model, **more}, again) == {}


def test_a_tokenizer_json_and_gpt2s_get_their_class(tmp_path: Path) -> None:
    folder = ROOT / "tests" / "data" / "tokenizer"
    bare = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    ours = build_tokenizer("HuggingFaceTokenizer", str(folder), None)
    (made,) = auto_tokenizer(bare, ours).values()
    assert json.loads(made)["tokenizer_class"] == "PreTrainedTokenizerFast"
    theirs = loaded(written(tmp_path / "json", bare | {"tokenizer_config.json": made}))
    assert theirs.encode("abc é", add_special_tokens=False) == ours.encode("abc é")
    vocabulary = {chr(i): i for i in range(33, 127)} | {"Ġ": 127, "ab": 128, "<|endoftext|>": 129}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    gpt2 = {name: (tmp_path / name).read_bytes() for name in ("vocab.json", "merges.txt")}
    ours = build_tokenizer("GPT2BPETokenizer", str(tmp_path / "vocab.json"), None)
    theirs = loaded(written(tmp_path / "gpt2", gpt2 | auto_tokenizer(gpt2, ours)))
    assert theirs.encode("ab ba") == ours.encode("ab ba") != []
