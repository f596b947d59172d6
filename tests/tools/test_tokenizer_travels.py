# SPDX-License-Identifier: Apache-2.0
"""A tokenizer goes whole from a folder through save, resume, sampling and export."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.llama import Llama, LlamaConfig, hf_config, hf_names
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.param import unique_parameters
from tests.training.small_llama import read
from tools.checkpoint import main as checkpoint
from tools.generate import main as generate
from training.checkpoint import find_latest, parameter_pieces, save
from training.data.tokenizer import build_tokenizer
from training.data.tokenizer_files import digests_of, files_of, with_class
from training.run import same_run
from training.run.export import tokenizer_files

RUN = read()
TEXT = "def f(x):\n    return x"
FLAGS = ["--device", "cpu", "--temperature", "0", "--max-new-tokens", "3", "--prompt", TEXT]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the tokenizer of an ordinary Hugging Face directory: 260 tokens, of which 4 special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    at = tmp_path / "their tokenizer"
    at.mkdir()
    alphabet = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    model = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|pad|>"]
    model.add_special_tokens([AddedToken(token, special=True) for token in special])
    model.save(str(at / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"content": "<|eot_id|>", "__type": "AddedToken"},
        "chat_template": "{{ messages }}",
    }
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    (at / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|pad|>"}))
    (at / "chat_template.jinja").write_text("{{ messages }}")
    (at / "unrelated.json").write_text("{}")
    return at


def data_of(path: Path) -> Any:
    return replace(
        RUN.data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path), mock_data=False
    )


def saved(root: Path, path: Path, **state: Any) -> Path:
    """Save a model as a run with --tokenizer-model `path` does."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(path), None)
    attach = same_run.tokenizer_files(data_of(path))
    config = LlamaConfig(
        260, 32, 48, 1, 2, 2, make_vocab_size_divisible_by=4, max_position_embeddings=64
    )
    model = Llama(config, LayerContext()).initialize(1)
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), Grid())
    held = {
        "hf_config": hf_config(config),
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": next(iter(attach)),
        **digests_of(tokenizer),
        **state,
    }
    save(root, step=1, pieces=pieces, state=held, grid=Grid(), attach=attach)
    return root


WHOLE = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"} | {
    "chat_template.jinja"
}


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_folder_is_saved_whole_and_sampled_from(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """generate.py refused such a run, or found no tokenizer, as one file of it was kept at most."""
    root = saved(tmp_path / "run", folder / name)
    shutil.rmtree(folder)
    held = {path.name for path in (root / "step_00000001").iterdir()}
    assert WHOLE <= held and "unrelated.json" not in held
    assert generate(["--load", str(root), *FLAGS]) == 0
    assert capsys.readouterr().out.startswith(TEXT)


def test_export_carries_the_files_and_the_ids(folder: Path, tmp_path: Path) -> None:
    root, out = saved(tmp_path / "run", folder), tmp_path / "out"
    checkpoint(["convert", "--to-hf", str(out), "--load", str(root)])
    for name in WHOLE:
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    for name in ("config.json", "generation_config.json"):
        found = json.loads((out / name).read_text())
        assert (found["bos_token_id"], found["eos_token_id"]) == (256, 258), name


@pytest.mark.prove
def test_transformers_reads_what_we_export(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    root, out = saved(tmp_path / "run", folder), tmp_path / "out"
    checkpoint(["convert", "--to-hf", str(out), "--load", str(root)])
    theirs = AutoTokenizer.from_pretrained(out)
    ours = build_tokenizer("HuggingFaceTokenizer", str(folder), None)
    assert theirs.encode(TEXT, add_special_tokens=False) == ours.encode(TEXT)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eod) == (256, 258)
    assert theirs.chat_template == "{{ messages }}"
    model = LlamaForCausalLM.from_pretrained(out)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (
        256,
        258,
    )


def test_a_hugging_face_directory_needs_no_tokenizer_flags(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = saved(tmp_path / "run", folder), tmp_path / "out"
    checkpoint(["convert", "--to-hf", str(out), "--load", str(root)])
    capsys.readouterr()
    said = []
    for place in (root, out):
        assert generate(["--load", str(place), *FLAGS]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].startswith(TEXT)


def test_ids_of_an_imported_model_are_kept(folder: Path, tmp_path: Path) -> None:
    """An instruct model ends with one of several tokens, which no tokenizer says."""
    ends = [257, 258]
    root = saved(tmp_path / "run", folder)
    state = find_latest(root, Grid()).state  # type: ignore[union-attr]
    sizes = {**state["hf_config"], "bos_token_id": 256, "eos_token_id": ends}
    other = saved(tmp_path / "imported", folder, hf_config=sizes)
    checkpoint(["convert", "--to-hf", str(tmp_path / "out"), "--load", str(other)])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == ends


def test_a_sentencepiece_model_gets_the_name_that_hugging_face_reads(tmp_path: Path) -> None:
    from tools.train_tokenizer import Texts, train

    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven\n" * 50)
    train(Texts([text]), tmp_path / "own", 300)
    data = replace(
        RUN.data,
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=str(tmp_path / "own.model"),
    )
    assert list(same_run.tokenizer_files(data)) == ["own.model"]  # and not text.txt, own.vocab
    config = LlamaConfig(300, 32, 48, 1, 2, 2)
    model = Llama(config, LayerContext()).initialize(1)
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), Grid())
    state = {"hf_config": hf_config(config), "tokenizer_type": "SentencePieceTokenizer"}
    state["tokenizer_model"] = "own.model"
    attach = same_run.tokenizer_files(data)
    save(tmp_path / "run", step=1, pieces=pieces, state=state, grid=Grid(), attach=attach)
    out = tmp_path / "out"
    checkpoint(["convert", "--to-hf", str(out), "--load", str(tmp_path / "run")])
    assert (out / "tokenizer.model").read_bytes() == (tmp_path / "own.model").read_bytes()
    found = json.loads((out / "config.json").read_text())
    assert (found["bos_token_id"], found["eos_token_id"]) == (1, 2)


def refusals(root: Path, path: Path) -> list[str]:
    found = find_latest(root, Grid())
    assert found is not None
    digests = digests_of(build_tokenizer("HuggingFaceTokenizer", str(path), None))
    return [what for what, _ in same_run.changes(found, replace(RUN, data=data_of(path)), digests)]


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=3))


def test_a_resume_minds_what_changes_tokens_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    root = saved(tmp_path / "run", folder)
    assert not refusals(root, folder)
    edit(folder / "tokenizer_config.json", chat_template="another", model_max_length=7)
    edit(folder / "tokenizer.json", truncation=None, padding=None)  # and its spelling
    assert not refusals(root, folder)
    edit(folder / "tokenizer_config.json", eos_token="<|end_of_text|>")
    assert refusals(root, folder) == ["tokenizer"]
    edit(folder / "tokenizer_config.json", eos_token="<|eot_id|>")
    assert not refusals(root, folder)
    pre = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    edit(folder / "tokenizer.json", pre_tokenizer=pre)
    assert refusals(root, folder) == ["tokenizer"]


def test_old_digests_still_load(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They covered tokenizer_config.json, of which a checkpoint then kept no copy."""
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    old = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    facts = {"tokenizer_digest": old, "tokenizer_digest_before": None, "tokenizer_sha256": None}
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(files[0], alone)
    for name, path in (("folder", folder), ("file", alone)):
        root = saved(tmp_path / name, path, **facts)
        assert not refusals(root, folder)
        assert generate(["--load", str(root), *FLAGS]) == 0
        assert capsys.readouterr().out.startswith(TEXT)
    edit(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    assert refusals(root, folder) == ["tokenizer"]


def test_the_class_that_config_json_chooses_goes_along(tmp_path: Path) -> None:
    """A Mistral's folder names LlamaTokenizer, and is read as tokenizer.json says all the same."""
    from tests.training.data.tokenizer_forms import byte_level, sentencepiece

    folder = tmp_path / "mistral"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(sentencepiece()))
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    llama = build_tokenizer("HuggingFaceTokenizer", str(folder), None)
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    theirs = build_tokenizer("HuggingFaceTokenizer", str(folder), None)
    assert theirs.encode(" hello") != llama.encode(" hello")
    step = saved(tmp_path / "run", folder) / "step_00000001"
    ours = build_tokenizer("HuggingFaceTokenizer", str(step), None)
    assert (ours.encode(" hello"), ours.digest()) == (theirs.encode(" hello"), theirs.digest())
    kept = json.loads(tokenizer_files(folder)["tokenizer_config.json"])
    assert kept == {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
    gpt2 = {"tokenizer.json": json.dumps(byte_level()).encode()}
    gpt2["tokenizer_config.json"] = b'{"eos_token": "<|endoftext|>"}'
    exported = with_class(gpt2, None, "qwen3")["tokenizer_config.json"]  # which has its own regex
    assert json.loads(exported)["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_files_of_a_folder_of_many_tokenizers(tmp_path: Path) -> None:
    for name in ("a.json", "tokenizer.json", "tokenizer_config.json", "merges.txt", "b.model"):
        (tmp_path / name).write_text("{}")
    here = str(tmp_path)
    found = {
        ("HuggingFaceTokenizer", "a.json"): ["a.json", "tokenizer_config.json"],
        ("SentencePieceTokenizer", "b.model"): ["b.model"],
        ("GPT2BPETokenizer", "a.json"): ["a.json", "merges.txt"],
    }
    for (kind, name), wanted in found.items():
        assert list(files_of(kind, f"{here}/{name}")) == wanted
    assert list(files_of("HuggingFaceTokenizer", here))[0] == "tokenizer.json"
    assert files_of("NullTokenizer", None) == {} == files_of("TikTokenizer", here)
