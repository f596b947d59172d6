# SPDX-License-Identifier: Apache-2.0
"""Convert a Hugging Face Llama to a checkpoint, or a checkpoint to a Hugging Face directory.

One tensor is in memory at a time. What is written is complete or absent.
"""

import json
import os
import secrets
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model.llama import Llama, LlamaConfig
from model.load import ModelFile, model_file_of, read_sizes, saved_config
from mpu.context import LayerContext
from mpu.grid import Grid
from tools.checkpoints.auto_tokenizer import auto_tokenizer
from tools.checkpoints.copy import attached, check_empty, from_hf, open_newest, stream
from tools.checkpoints.fused import fused_pieces
from training.checkpoint import Checkpoint, buffer_pieces, weight_pieces
from training.checkpoint import save as save_checkpoint
from training.checkpoint.files import (
    fsync_directory,
    open_plain,
    write_bytes,
    write_json,
    write_safetensors,
)
from training.checkpoint.header import BY_NAME
from training.checkpoint.huggingface import EMBEDDING, HuggingFaceDirectory
from training.checkpoint.pieces import into_files
from training.data.tokenizer import tokenizer_of
from training.data.tokenizer_files import MODEL, STANDARD, TOKENIZER_FILES, tokenizer_in
from training.untrusted import nothing_downloaded

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json, kept as they are


def expected_tensors(file: ModelFile, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return {canonical name: full shape} of a model, without allocating it."""
    model = _on_meta(file, config)
    pieces = weight_pieces(model, file.hf_names(model), model.ctx.grid)
    return {piece.name: piece.shape for piece in pieces}


def _on_meta(file: ModelFile, config: LlamaConfig) -> Llama:
    return file.Model(config, LayerContext(Grid(), device=torch.device("meta")))


def check_shapes(found: Checkpoint, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless every tensor of the model is there in its shape."""
    for name, shape in expected.items():
        if name not in found.index:
            raise ValueError(f"{found.directory}: the tensor {name} is missing")
        there = found.index[name]["shape"]
        if tuple(there) != shape:
            raise ValueError(
                f"{found.directory}: {name} has shape {there}; its config asks for {list(shape)}"
            )


def tokenizer_files(root: Path) -> dict[str, bytes]:
    """Return {name: bytes} of the tokenizer's files in a directory."""
    found = {}
    for name in TOKENIZER_FILES:
        if os.path.lexists(root / name):
            with open_plain(root / name) as file:
                found[name] = file.read()
    return found


def exported_tokenizer(
    found: Checkpoint, given: Path | None
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the tokenizer's files for an export, and the ids for its config.json.

    given: --tokenizer. The files have the names that Hugging Face looks for, and those that
    transformers.AutoTokenizer reads are added where they are missing. The ids of a model
    that was imported are kept; else they are the tokenizer's own. Raises ValueError.
    """
    state = found.state if given is None else {}
    directory = found.directory if given is None else given
    if given is not None or isinstance(found, HuggingFaceDirectory):
        extra = tokenizer_files(directory)
    else:
        kind, own = (str(state.get(f"tokenizer_{what}")) for what in ("type", "model"))
        extra = attached(found, {*TOKENIZER_FILES, own})
        if own in extra:
            extra[STANDARD.get(kind, MODEL)] = extra.pop(own)
    sizes = found.state["hf_config"]
    ids = {k: sizes[k] for k in TOKEN_IDS if sizes.get(k) is not None}
    if given is not None or not ids:
        tokenizer = tokenizer_in(state, str(directory), sizes.get("vocab_size"))
        if tokenizer is not None:
            ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}
            extra |= auto_tokenizer(extra, tokenizer)
    if ids and "generation_config.json" not in extra:
        known = {"_from_model_config": True, **{k: v for k, v in ids.items() if v is not None}}
        extra["generation_config.json"] = json.dumps(known, indent=2).encode()
    return extra, ids


def import_hf(source: Path, root: Path, own: str | None = None) -> Path:
    """Write a Hugging Face directory as a checkpoint of step 0; return the new directory.

    own: the file of a fork, here and in `export_hf`.
    """
    if not source.is_dir():
        raise ValueError(f"--from-hf {source} is not a directory ({nothing_downloaded(source)})")
    found = HuggingFaceDirectory(source, partial(from_hf, own=own))
    file = model_file_of(found.config, own=own)
    config = read_sizes(file, found.config)
    expected = expected_tensors(file, config)
    check_shapes(found, expected)
    found.check_names(expected)
    found.verify(found.manifest["files"])
    check_empty(root)
    dtype = str(BY_NAME[found.index[EMBEDDING]["dtype"]]).removeprefix("torch.")
    ids = {k: found.config[k] for k in TOKEN_IDS if found.config.get(k) is not None}
    files = tokenizer_files(found.directory)
    state = {
        **found.state,
        "hf_config": {**file.hf_config(config, dtype), **ids},
        **tokenizer_of(files),
    }
    pieces = stream(found, expected)
    return save_checkpoint(root, step=0, pieces=pieces, state=state, grid=Grid(), attach=files)


def export_hf(
    place: Path,
    target: Path,
    dtype: torch.dtype | None,
    shard_bytes: int,
    tokenizer: Path | None,
    own: str | None = None,
    fused: bool = False,
) -> Path:
    """Write the newest whole checkpoint as a Hugging Face directory; return what was read.

    fused: experts as two tensors a layer (tools/checkpoints/fused.py).
    """
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--to-hf {target} exists and is not an empty directory")
    found = open_newest(place, hashed=True)
    if "hf_config" not in found.state:
        raise ValueError(f"{found.directory}: state.json has no hf_config, the model's sizes")
    sizes, saved = found.state["hf_config"], found.state.get("config")
    file = model_file_of(sizes, saved, own)
    expected = expected_tensors(file, saved_config(file, sizes, saved))
    check_shapes(found, expected)
    model = _on_meta(file, saved_config(file, sizes, saved))
    buffers = {p.name for p in buffer_pieces(model, file.hf_names(model), Grid())}
    pieces = stream(found, [name for name in expected if name not in buffers], dtype)
    pieces += stream(found, sorted(buffers))  # a bias of the choice stays in fp32
    pieces = fused_pieces(found, pieces, dtype) if fused else pieces
    files = into_files(pieces, shard_bytes)
    kept = str(pieces[0].tensor.dtype).removeprefix("torch.")
    config = {**sizes, "torch_dtype": kept}
    extra, ids = exported_tokenizer(found, tokenizer)
    config.update(ids)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
    aside.mkdir(mode=0o700)
    try:
        weight_map = {}
        for i, group in enumerate(files, 1):
            many = f"model-{i:05d}-of-{len(files):05d}.safetensors"
            name = many if len(files) > 1 else "model.safetensors"
            write_safetensors(aside / name, group, metadata={"format": "pt"})
            weight_map.update({piece.name: name for piece in group})
        if len(files) > 1:
            total = {"total_size": sum(piece.nbytes for piece in pieces)}
            index = {"metadata": total, "weight_map": weight_map}
            write_json(aside / "model.safetensors.index.json", index)
        write_json(aside / "config.json", config)
        for name, data in extra.items():
            write_bytes(aside / name, data)
        fsync_directory(aside)
        os.rename(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    fsync_directory(target.parent)
    return found.directory
