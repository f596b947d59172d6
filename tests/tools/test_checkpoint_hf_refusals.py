# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory that contradicts itself is refused in a sentence; nothing is written."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.llama import Llama, LlamaConfig, hf_config, hf_names
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.param import unique_parameters
from tests.sampling import sampled
from tools.checkpoint import main
from training.checkpoint import parameter_pieces, save

CONFIG = LlamaConfig(251, 96, 136, 3, 8, 4, tied=True)


def directory(tmp_path: Path) -> Path:
    """Write a small tied Llama in several shards with an index."""
    model = Llama(CONFIG, LayerContext()).initialize(1)
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), Grid())
    state = {"hf_config": hf_config(CONFIG)}
    save(tmp_path / "made", step=0, pieces=pieces, state=state, grid=Grid())
    shards = ["--max-shard-size", "0.0004"]
    main(["convert", "--to-hf", str(tmp_path / "hf"), "--load", str(tmp_path / "made"), *shards])
    return tmp_path / "hf"


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run the tool, which must refuse with exit code 2; return its one sentence."""
    assert main(["convert", *map(str, argv)]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("checkpoint: ")
    return said


def change_map(hf: Path, name: str, file: str | None) -> None:
    path = hf / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].pop(name, None)
    if file is not None:
        index["weight_map"][name] = file
    path.write_text(json.dumps(index))


def change_shard(hf: Path, name: str, tensor: torch.Tensor | None, listed: bool = True) -> None:
    """Put a tensor in the shard that holds (or would hold) it, or take it out."""
    index = json.loads((hf / "model.safetensors.index.json").read_text())["weight_map"]
    file = index.get(name, next(iter(index.values())))
    tensors = load_file(hf / file)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, hf / file)
    if listed:
        change_map(hf, name, None if tensor is None else file)


NORM = "model.norm.weight"


def header(hf: Path, length: int, text: bytes) -> None:
    next(hf.glob("*.safetensors")).write_bytes(length.to_bytes(8, "little") + text)


OVERLAP = json.dumps(
    {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }
).encode()
WRONG = {
    "a path in the index": (
        lambda hf: change_map(hf, NORM, "../secret.safetensors"),
        "not the plain name of a .safetensors file",
    ),
    "an absolute path": (
        lambda hf: change_map(hf, NORM, "/etc/x.safetensors"),
        "not the plain name",
    ),
    "a pickle in the index": (lambda hf: change_map(hf, NORM, "x.bin"), "not the plain name"),
    "a shard that is not there": (
        lambda hf: change_map(hf, NORM, "model-9.safetensors"),
        "lists model-9.safetensors, which is not there",
    ),
    "a missing tensor": (
        lambda hf: change_shard(hf, NORM, None),
        f"the tensor {NORM} is missing; closest names: model.embed_tokens.weight, model.layers.",
    ),
    "a tensor too many": (
        lambda hf: change_shard(hf, "model.layers.3.mlp.down_proj.weight", torch.zeros(2)),
        "model.layers.3.mlp.down_proj.weight is not a tensor of the Llama in config.json",
    ),
    "a wrong shape": (
        lambda hf: change_shard(hf, NORM, torch.zeros(95)),
        f"{NORM} has shape [95]; its config asks for [96]",
    ),
    "integers": (
        lambda hf: change_shard(hf, NORM, torch.zeros(96, dtype=torch.int32)),
        f"{NORM} is I32; only ",
    ),
    "a head that is not the embedding": (
        lambda hf: change_shard(hf, "lm_head.weight", torch.zeros(251, 96)),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "a huge header": (lambda hf: header(hf, 1 << 62, b"{}"), "is not a valid safetensors file"),
    "a header past the end": (lambda hf: header(hf, 100, b"{}"), "is not a valid safetensors file"),
    "no JSON in the header": (lambda hf: header(hf, 2, b"[["), "is not a valid safetensors file"),
    "overlapping tensors": (
        lambda hf: header(hf, len(OVERLAP), OVERLAP + bytes(12)),
        "is not a valid safetensors file",
    ),
    "an index that is no JSON": (
        lambda hf: (hf / "model.safetensors.index.json").write_text("{"),
        "index.json is not JSON",
    ),
    "no config": (lambda hf: (hf / "config.json").unlink(), "config.json: No such file"),
    "another architecture": (
        lambda hf: (hf / "config.json").write_text('{"model_type": "gptj"}'),
        "model_type is 'gptj'",
    ),
    "a config without sizes": (
        lambda hf: (hf / "config.json").write_text('{"model_type": "llama"}'),
        "missing or bad field",
    ),
}


@pytest.mark.parametrize("what", sampled([*WRONG], 2))
def test_a_lying_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    hf, (spoil, sentence) = directory(tmp_path), WRONG[what]
    spoil(hf)
    assert sentence in refusal(capsys, "--from-hf", hf, "--save", tmp_path / "weft")
    assert not (tmp_path / "weft").exists(), "nothing is written"


def test_what_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, weft, out = directory(tmp_path), tmp_path / "weft", tmp_path / "out"
    main(["convert", "--from-hf", str(hf), "--save", str(weft)])
    assert "already holds checkpoints" in refusal(capsys, "--from-hf", hf, "--save", weft)
    assert "not an empty directory" in refusal(capsys, "--to-hf", hf, "--load", weft)
    assert "no checkpoint there" in refusal(capsys, "--to-hf", out, "--load", tmp_path / "no")
    assert sorted(os.listdir(tmp_path)) == ["hf", "made", "weft"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"IQ== 0\nIg== 1\n", "TikTokenizer"), (b"\n\x0e\n\x05<unk>", "Llama2Tokenizer")],
)
def test_the_kind_of_a_tokenizer_is_read_off_its_file(
    tmp_path: Path, content: bytes, kind: str
) -> None:
    hf = directory(tmp_path)
    (hf / "tokenizer.model").write_bytes(content)
    main(["convert", "--from-hf", str(hf), "--save", str(tmp_path / "weft")])
    state = json.loads((tmp_path / "weft" / "step_00000000" / "state.json").read_text())
    assert (state["tokenizer_type"], state["tokenizer_model"]) == (kind, "tokenizer.model")
    copy = tmp_path / "weft" / "step_00000000" / "tokenizer.model"
    assert copy.read_bytes() == content
