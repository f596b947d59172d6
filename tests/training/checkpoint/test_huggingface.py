# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory opens like a checkpoint; one that contradicts itself is refused."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model.llama import LlamaConfig, from_hf_config, hf_config
from mpu.grid import Grid
from training.checkpoint import CheckpointError, MismatchError, NamedPiece, header, huggingface
from training.checkpoint.find import find_latest, newest
from training.checkpoint.header import read_header
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.pieces import whole
from training.data.foreign_code import read_model
from training.files.untrusted import trust_owners

SIZES = hf_config(LlamaConfig(250, 64, 96, 2, 8, 4))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    return hf_config(from_hf_config(config))


def make(root: Path, config: dict[str, Any] | None = None, **shards: dict[str, Any]) -> Path:
    """Write a directory: shards is {file's stem: tensors}."""
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(config or SIZES))
    for stem, tensors in shards.items():
        save_file(tensors, root / f"{stem}.safetensors")
    if list(shards) != ["model"]:
        listed = {n: f"{stem}.safetensors" for stem, ts in shards.items() for n in ts}
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return root


def two(root: Path) -> Path:
    return make(
        root,
        one={"a": torch.arange(12.0).view(4, 3)},
        two={"b": torch.arange(5).bfloat16(), "c": torch.ones(2)},
    )


def test_it_offers_what_a_checkpoint_offers(tmp_path: Path) -> None:
    found = HuggingFaceDirectory(two(tmp_path))
    assert found.directory == tmp_path and found.state["hf_config"] == SIZES
    assert found.index["b"] == {
        "dtype": "BF16",
        "shape": [5],
        "parts": [["two.safetensors", "b", [0], [5]]],
    }
    found.check_sizes()
    found.check_model({**SIZES, "torch_dtype": "bfloat16"})
    with pytest.raises(MismatchError, match="another model: hidden_size is 64 there and 65 here"):
        found.check_model({**SIZES, "hidden_size": 65})
    corner = NamedPiece("a", (4, 3), (1, 1), (2, 2), torch.zeros(2, 2, dtype=torch.float64))
    tail = NamedPiece("b", (5,), (3,), (2,), torch.zeros(2))
    with pytest.raises(MismatchError, match="a was saved in F32"):
        found.check_tensors([corner], cast=False)
    found.check_tensors([corner, tail], cast=True)
    assert found.files_of([tail]) == ["two.safetensors"]
    found.verify(found.files_of([corner, tail]))
    found.read([corner, tail])
    assert corner.tensor.tolist() == [[4, 5], [7, 8]] and tail.tensor.tolist() == [3, 4]
    with pytest.raises(MismatchError, match=r"lacks optimizer state \(a.exp_avg\)"):
        found.check_tensors([whole("a.exp_avg", torch.zeros(4, 3))], cast=True)


def test_a_tensor_that_the_model_does_not_know(tmp_path: Path) -> None:
    found = HuggingFaceDirectory(two(tmp_path))
    found.check_names(["c", "b", "a", "more"])
    with pytest.raises(CheckpointError, match=f"{tmp_path}: c is not a tensor of the Llama"):
        found.check_names({"a", "b"})


def test_layers_that_predict_further_tokens_are_left_out_with_a_line(tmp_path: Path) -> None:
    """They follow the model's own layers, as in DeepSeek-V3's folder."""
    names = ("model.layers.1.w", "model.layers.2.w", "model.layers.2.eh_proj.weight")
    sizes = SIZES | {"num_nextn_predict_layers": 1}
    found = HuggingFaceDirectory(
        make(tmp_path, config=sizes, one={name: torch.ones(2) for name in names})
    )
    found.check_names(names[:1])
    assert found.left_out == f"2 tensors of multi-token prediction are left out: {names[2]}, ..."
    (tmp_path / "none").mkdir()
    other = HuggingFaceDirectory(
        make(tmp_path / "none", config=SIZES, one={name: torch.ones(2) for name in names})
    )
    assert not other.left_out
    with pytest.raises(CheckpointError, match="eh_proj.weight is not a tensor of the Llama"):
        other.check_names(names[:1])


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    found = HuggingFaceDirectory(two(tmp_path))
    os.truncate(tmp_path / "two.safetensors", 90)
    found.verify(["one.safetensors"])
    with pytest.raises(CheckpointError, match="two.safetensors has 90 bytes where"):
        found.verify(["one.safetensors", "two.safetensors"])


SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TRANSFORMERS_4 = {"rope_theta": 500000.0, "rope_scaling": SCALING, "torch_dtype": "bfloat16"}
TRANSFORMERS_5 = {"rope_parameters": {"rope_theta": 500000.0, **SCALING}, "dtype": "bfloat16"}


@pytest.mark.parametrize("spelling", [TRANSFORMERS_4, TRANSFORMERS_5])
def test_configs_of_transformers_4_and_5(tmp_path: Path, spelling: dict[str, Any]) -> None:
    plain = {k: v for k, v in SIZES.items() if k not in ("rope_theta", "rope_scaling", "head_dim")}
    found = HuggingFaceDirectory(
        make(tmp_path, {**plain, **spelling, "use_cache": True}, model={"a": torch.ones(1)}),
        from_hf,
    )
    want = {**SIZES, "rope_theta": 500000.0, "rope_scaling": SCALING}
    found.check_model(want)
    for field, value in {"rope_theta": 10000.0, "rope_scaling": None, "head_dim": 9}.items():
        with pytest.raises(MismatchError, match=f"another model: {field} is"):
            found.check_model({**want, field: value})


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "gptj"}, "config.json: model_type is 'gptj'"),
        ({"model_type": "llama"}, "config.json: missing or bad field: "),
        ({**SIZES, "rope_scaling": "yes"}, "rope_scaling is 'yes': it must be an object"),
        ({**SIZES, "attention_bias": True}, "config.json: attention_bias is True"),
        ({**SIZES, "rope_scaling": {**SCALING, "rope_type": "longrope"}}, "Llama 3.1's rule"),
        (
            {**SIZES, "rope_scaling": {"rope_type": "yarn", "factor": 0.5}},
            "yarn's factor is 0.5: it must be a finite number from 1 on",
        ),
        (
            {**SIZES, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 40}},
            "yarn's beta_fast is 32: it must be at least beta_slow, 40",
        ),
    ],
)
def test_a_config_of_something_else(tmp_path: Path, config: dict[str, Any], sentence: str) -> None:
    make(tmp_path, config, model={"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match=sentence) as refusal:
        HuggingFaceDirectory(tmp_path, from_hf)
    assert str(refusal.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("place", ["same file", "another file"])
@pytest.mark.parametrize("row", [None, 0, 2999])
def test_the_second_copy_of_tied_embeddings(tmp_path: Path, place: str, row: int | None) -> None:
    embedding = torch.randn(3000, 4)
    copy = embedding.clone()
    if row is not None:
        copy[row, 3] += 1
    config = {**SIZES, "tie_word_embeddings": True}
    if place == "same file":
        make(tmp_path, config, model={EMBEDDING: embedding, HEAD: copy})
    else:
        make(tmp_path, config, one={EMBEDDING: embedding}, two={HEAD: copy})
    found = HuggingFaceDirectory(tmp_path)
    assert list(found.index) == [EMBEDDING]
    with pytest.raises(MismatchError, match=f"no {HEAD}"):
        found.check_tensors([whole(HEAD, copy)], cast=False)
    if place == "another file":
        found.verify(["two.safetensors"])  # who has the embedding compares
    if row is None:
        found.verify(found.manifest["files"])
    else:
        with pytest.raises(CheckpointError, match=f"{HEAD} differs from {EMBEDDING}"):
            found.verify(found.manifest["files"])


def test_a_head_of_its_own_and_derived_tables(tmp_path: Path) -> None:
    derived = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = {EMBEDDING: torch.zeros(3, 4), HEAD: torch.ones(3, 4), derived: torch.ones(2)}
    found = HuggingFaceDirectory(make(tmp_path, model=tensors))
    assert sorted(found.index) == [HEAD, EMBEDDING]
    found.verify(found.manifest["files"])


def test_a_snapshot_in_hugging_faces_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are links to those of the cache; whoever may set a link must be trusted."""
    two(tmp_path / "real")
    plain = HuggingFaceDirectory(tmp_path / "real").index
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert HuggingFaceDirectory(tmp_path / "link").directory == tmp_path / "real"
    for i, file in enumerate(list((tmp_path / "real").iterdir())):
        file.rename(tmp_path / f"blob{i}")
        file.symlink_to(Path("..") / f"blob{i}")
    found = HuggingFaceDirectory(tmp_path / "link")
    assert found.index == plain
    snapshot = tmp_path / "model/snapshots/abc"
    for folder in (tmp_path / "model/blobs", snapshot):
        folder.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"give one of its snapshots, such as {snapshot}"):
        newest("--pretrained-checkpoint", tmp_path / "model", None)
    found.check_sizes()
    found.verify(found.manifest["files"])
    found.read([read := whole("a", torch.zeros(4, 3))])
    assert torch.equal(read.tensor, torch.arange(12.0).view(4, 3))
    for name in ("one.safetensors", "config.json", "model.safetensors.index.json"):
        link, lstat = tmp_path / "real" / name, Path.lstat

        def of_another(path: Path, link: Path = link, lstat: Any = lstat) -> os.stat_result:
            seen = lstat(path)
            other = seen[:4] + (12345,) + seen[5:]
            return os.stat_result(other) if path == link else seen

        with monkeypatch.context() as patch, pytest.raises(CheckpointError) as error:
            patch.setattr(Path, "lstat", of_another)
            HuggingFaceDirectory(tmp_path / "real")
        assert f"{name} belongs to the user with number 12345" in str(error.value)


@pytest.mark.parametrize("name", ["two.safetensors", "config.json", "."])
def test_somebody_elses_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two(tmp_path)
    if os.geteuid() == 0:
        os.chown(tmp_path / name, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CheckpointError, match="belongs to the user with number") as error:
        HuggingFaceDirectory(tmp_path)
    assert newest("--load", tmp_path, None, refused := []) is None
    assert "--trust-owner" in str(refused[0])  # as --use-checkpoint-args tells it
    owner = str(os.stat(tmp_path / name).st_uid)
    assert f"if you trust that user, --trust-owner {owner} reads it where it is" in str(error.value)
    try:
        trust_owners([owner])
        assert HuggingFaceDirectory(tmp_path).index
    finally:
        trust_owners([])


def test_what_is_no_plain_file(tmp_path: Path) -> None:
    two(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    os.mkfifo(tmp_path / "two.safetensors")  # opening it to read would wait forever
    with pytest.raises(CheckpointError, match="two.safetensors is not a plain file"):
        HuggingFaceDirectory(tmp_path)


INSTEAD = {
    "adapter_config.json adapter_model.safetensors": "an adapter, which .*: merge it",
    "model.fp16.safetensors": "a variant",
    "model.safetensors.index.fp16.json": "a variant",
    "model-00001-of-00002.safetensors model-00002-of-00002.safetensors": "shards without model.saf",
    "pytorch_model.bin": "pickles, which can run code",
    "pytorch_model.bin.index.json pytorch_model-00001-of-00001.bin": "pickles, which can run code",
    "consolidated.00.pth consolidated.01.pth": "Meta's or Mistral's names",
    "consolidated.safetensors": "Meta's or Mistral's names",
    "shard-00001-model-00001-of-00001.safetensors": "a distributed save",
    "llama.Q4_K_M.gguf": "GGUF, which is not read",
}


@pytest.mark.parametrize("files", INSTEAD)
def test_a_folder_without_weights_says_what_it_has(tmp_path: Path, files: str) -> None:
    """With a config.json, and without one, where a --load would otherwise begin anew."""
    names = sorted(files.split())
    for name in names:
        (tmp_path / name).write_bytes(b"")
    said = f"but {re.escape(', '.join(names))}: .*{INSTEAD[files]}"
    with pytest.raises(MismatchError, match=f"--load: {tmp_path}: there is no config.json, {said}"):
        find_latest(tmp_path, Grid())
    make(tmp_path, model={"a": torch.ones(1)})
    if names[0].startswith(("adapter_c", "shard")):  # transformers would read that too
        with pytest.raises(CheckpointError, match=f"next to model.safetensors there is {names[0]}"):
            HuggingFaceDirectory(tmp_path)
    else:
        assert [*HuggingFaceDirectory(tmp_path).index] == ["a"]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"neither model.safetensors nor .*, {said}"):
        HuggingFaceDirectory(tmp_path)


def test_a_folder_with_nothing_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"")
    assert find_latest(tmp_path, Grid()) is None
    make(tmp_path, model={"a": torch.ones(1)})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json, but training_args.bin$"):
        HuggingFaceDirectory(tmp_path)
    make(tmp_path, SIZES | {"transformers_weights": "b.safetensors"})
    with pytest.raises(CheckpointError, match="names 'b.safetensors' .*, which is not there"):
        HuggingFaceDirectory(tmp_path)


def test_shards_that_are_missing(tmp_path: Path) -> None:
    two(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lists two.*, which is not there; of its 2 files"):
        HuggingFaceDirectory(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    """The last counts, as in transformers, unless the index says another."""
    make(tmp_path, one={"a": torch.ones(1), "b": torch.ones(1)}, two={"a": torch.zeros(1)})
    found = HuggingFaceDirectory(tmp_path)
    found.read([read := whole("a", torch.ones(1))])
    assert found.file_of("a") == "two.safetensors" and not read.tensor.any()
    make(tmp_path, two={"a": torch.zeros(1), "c": torch.ones(1)}, one={"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="two.safetensors and one.safetensors both hold a"):
        HuggingFaceDirectory(tmp_path)


def tensor(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header: Any, data: int = 0, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


ABSURD = {
    "nothing": (b"", "it has 0 bytes"),
    "a header of 4 EB": (raw(b"{}", length=1 << 62), "header has 4,611,686,018,427,387,904 b"),
    "a header beyond the end": (raw(b"{}", length=3), "3 bytes ends beyond the 10 of the file"),
    "no JSON": (raw(b"[["), "its header is not JSON"),
    "a deep header": (raw(b'{"a":' * 50_000), "its header is not JSON"),
    "metadata with a number": (raw({"__metadata__": {"a": 1}}), "__metadata__ is not an object"),
    "the same bytes": (raw({"a": tensor(0, 8), "b": tensor(0, 8)}, 8), "b overlaps another"),
    "a hole in front": (raw({"a": tensor(4, 12)}, 12), "a leaves a hole before it"),
    "a tail": (raw({"a": tensor(0, 8)}, 9), "its tensors end at byte 8, its data at 9"),
    "too many bytes": (raw({"a": tensor(0, 12)}, 12), "needs 8 bytes and has 12"),
    "negative offsets": (raw({"a": tensor(-8, 0)}, 8), "of a must be up to 8 numbers"),
    "more than 2^64": (raw({"a": tensor(0, 8, [1 << 62, 4])}, 8), "needs 73786976294838206464"),
    "true": (raw({"a": tensor(0, 4, [True])}, 4), "of a must be up to 8 numbers"),
    "no table": (raw({"a": 7}, 8), "a needs dtype, shape"),
    "a dtype that is a list": (raw({"a": tensor(0, 8, dtype=[])}, 8), r"a is \[\]; only F64"),
}
OURS_ALONE = {
    "a million dimensions": (raw({"a": tensor(0, 8, [1] * 10**6 + [2])}, 8), "must be up to 8"),
    "integers": (raw({"a": tensor(0, 8, dtype="I32")}, 8), "a is I32; only F64"),
}


@pytest.mark.parametrize("what", [*ABSURD, *OURS_ALONE])
def test_absurd_headers(tmp_path: Path, what: str) -> None:
    """Each is refused with its rule; the safetensors library, which reads next, agrees."""
    content, sentence = (ABSURD | OURS_ALONE)[what]
    path = make(tmp_path, model={"a": torch.ones(1)}) / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model.safetensors.*{sentence}") as refusal:
        HuggingFaceDirectory(tmp_path)
    assert len(str(refusal.value)) < 400 and "\n" not in str(refusal.value)
    if what in ABSURD:
        with pytest.raises(SafetensorError), safe_open(path, "pt") as file:
            file.keys()


def test_what_is_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config.json of 255 MB took 7 GB, a header of a million tensors a minute."""
    monkeypatch.setattr(header, "NAMES", 1)
    path = make(tmp_path, model={"a": torch.ones(1), "b": torch.ones(1)}) / "model.safetensors"
    with pytest.raises(CheckpointError, match="names 2 tensors, more than 1"):
        HuggingFaceDirectory(tmp_path)
    monkeypatch.setattr(huggingface, "NAMES", 1)
    path.rename(tmp_path / "a.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="index.json lists 2 tensors, more than 1"):
        HuggingFaceDirectory(tmp_path)
    with open(tmp_path / "config.json", "ab") as file:
        file.write(b" " * (1 << 20))
    with pytest.raises(CheckpointError, match="config.json is larger than 1,048,576 bytes"):
        HuggingFaceDirectory(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with open(tmp_path / "model.safetensors.index.json", "ab") as file:
        file.write(b" " * (1 << 24))
    with pytest.raises(CheckpointError, match="index.json is larger than 16,777,216 bytes"):
        HuggingFaceDirectory(tmp_path)


def test_a_tokenizer_of_more_than_128_mib_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate((1 << 27) + 1)
    with pytest.raises(ValueError, match="it has more than 134,217,728 bytes"):
        read_model(str(tmp_path / "tokenizer.json"))


def test_empty_tensors_are_sound(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(0, 3), "b": torch.zeros(2), "c": torch.zeros(())}, path)
    assert read_header(path)[1] == {"a": ("F32", [0, 3]), "b": ("F32", [2]), "c": ("F32", [])}
