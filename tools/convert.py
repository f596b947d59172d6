#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bring a Hugging Face Llama in as a checkpoint, or take a checkpoint out as a Hugging Face
directory.

    python tools/convert.py --from-hf Llama-3.2-1B --save runs/llama     then --load runs/llama
    --finetune python tools/convert.py --to-hf out --load runs/llama --dtype bfloat16

One tensor is in memory at a time, whatever the size of the model. What is written is complete or
absent. Weights must be safetensors: .bin files are pickles, which can run code, and are not read.
"""

import argparse
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from model.llama import Llama, LlamaConfig, from_hf_config, hf_config, hf_names
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.param import unique_parameters
from training.checkpoint import Checkpoint, NamedPiece, find_latest, parameter_pieces
from training.checkpoint import save as save_checkpoint
from training.checkpoint.files import (
    fsync_directory,
    read_checked,
    write_bytes,
    write_json,
    write_safetensors,
)
from training.checkpoint.find import candidates
from training.checkpoint.huggingface import BY_NAME, HuggingFaceDirectory
from training.checkpoint.pieces import into_files, whole

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json, kept as they are


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return {canonical name: full shape} of a model, without allocating it."""
    grid = Grid()
    model = Llama(config, LayerContext(grid, device=torch.device("meta")))
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), grid)
    return {piece.name: piece.shape for piece in pieces}


def tokenizer_facts(root: Path) -> dict[str, str]:
    """Say, as a checkpoint's state does, which tokenizer the files make that are copied along."""
    kind, file = "", "tokenizer.json"
    if (root / file).is_file():
        kind = "HuggingFaceTokenizer"
    elif (root / (file := "tokenizer.model")).is_file():
        # Llama 3's is lines of base64 and rank; Llama 2's is a SentencePiece protobuf
        with open(root / file, "rb") as opened:
            first = opened.readline(1000)
        tiktoken = re.fullmatch(rb"[A-Za-z0-9+/]+=* 0\r?\n", first) is not None
        kind = "TikTokenizer" if tiktoken else "Llama2Tokenizer"
    return {"tokenizer_type": kind, "tokenizer_model": file} if kind else {}


def attachments(root: Path) -> dict[str, bytes]:
    """Read the tokenizer's files of a directory."""
    return {n: (root / n).read_bytes() for n in TOKENIZER_FILES if (root / n).is_file()}


def import_hf(source: Path, root: Path) -> Path:
    """Write a Hugging Face directory as the checkpoint of step 0. Returns its directory."""
    found = HuggingFaceDirectory(source)
    try:
        config = from_hf_config(found.config)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source / 'config.json'}: missing or bad field: {error}") from None
    expected = expected_tensors(config)
    found.check(expected, config.tied)
    if candidates(root, None)[0]:
        raise ValueError(f"--save {root} already holds checkpoints; choose another directory")
    dtype = str(BY_NAME[found.tensors["model.embed_tokens.weight"][2]]).removeprefix("torch.")
    ids = {k: found.config[k] for k in TOKEN_IDS if found.config.get(k) is not None}
    state = {
        "iteration": 0,
        "consumed_samples": 0,
        "hf_config": {**hf_config(config, dtype), **ids},
        **tokenizer_facts(source),
    }
    pieces = [found.piece(name) for name in expected]
    return save_checkpoint(
        root, step=0, pieces=pieces, state=state, grid=Grid(), attach=attachments(source)
    )


def export_pieces(
    checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]], dtype: torch.dtype | None
) -> list[NamedPiece]:
    """List the model's tensors, each read when it is written, in `dtype` or the stored one."""

    def piece(name: str, shape: tuple[int, ...]) -> NamedPiece:
        stored = BY_NAME[checkpoint.index[name]["dtype"]]

        def fetch() -> Tensor:
            target = whole(name, torch.empty(shape, dtype=stored))
            checkpoint.read([target])
            return target.tensor.to(dtype or stored)

        return whole(name, torch.empty(shape, dtype=dtype or stored, device="meta"), fetch)

    return [piece(name, shape) for name, shape in expected.items()]


def export_hf(
    root: Path, target: Path, dtype: torch.dtype | None, shard_bytes: int, tokenizer: Path | None
) -> Path:
    """Write the newest whole checkpoint as a Hugging Face directory. Returns the checkpoint
    read."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--to-hf {target} exists and is not an empty directory")
    newest = find_latest(root, Grid(), note=lambda line: None)
    if newest is None:
        raise ValueError(f"--load {root}: there is no checkpoint")
    if "hf_config" not in newest.state:
        raise ValueError(f"--load {root}: state.json has no hf_config, the model's sizes")
    expected = expected_tensors(from_hf_config(newest.state["hf_config"]))
    wanted = [whole(n, torch.empty(shape, device="meta")) for n, shape in expected.items()]
    checkpoint = find_latest(
        root, Grid(), pieces=wanted, cast=True, expect=newest.state["hf_config"]
    )
    assert checkpoint is not None
    pieces = export_pieces(checkpoint, expected, dtype)
    files = into_files(pieces, shard_bytes)
    kept = str(pieces[0].tensor.dtype).removeprefix("torch.")
    config = {**checkpoint.state["hf_config"], "torch_dtype": kept}
    kept_files = checkpoint.manifest["files"]
    extra = (
        attachments(tokenizer)
        if tokenizer
        else {
            n: read_checked(checkpoint.directory / n, kept_files[n])
            for n in TOKENIZER_FILES
            if n in kept_files
        }
    )
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
    return checkpoint.directory


def parse(argv: Iterable[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face directory to read")
    way.add_argument("--to-hf", type=Path, metavar="DIR", help="Hugging Face directory to write")
    parser.add_argument("--save", type=Path, metavar="DIR", help="with --from-hf: where to write")
    parser.add_argument(
        "--load", type=Path, metavar="DIR", help="with --to-hf: checkpoints to read"
    )
    dtypes = ("float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", choices=dtypes, help="with --to-hf; left out: as stored")
    parser.add_argument(
        "--max-shard-size", type=float, default=5.0, metavar="GB", help="with --to-hf (5)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="with --to-hf: take the tokenizer's files there",
    )
    args = parser.parse_args(None if argv is None else list(argv))
    if args.from_hf and not args.save:
        parser.error("--from-hf needs --save")
    if args.to_hf and not args.load:
        parser.error("--to-hf needs --load")
    if args.from_hf and (args.dtype or args.tokenizer or args.load):
        parser.error("--dtype, --tokenizer and --load go with --to-hf: an import keeps every bit")
    if args.max_shard_size <= 0:
        parser.error(f"--max-shard-size {args.max_shard_size} must be positive")
    return args


def main(argv: Iterable[str] | None = None) -> None:
    """Convert one way or the other; a refusal is one sentence and exit code 2."""
    args = parse(argv)
    try:
        if args.from_hf:
            made = import_hf(args.from_hf, args.save)
            print(f"{args.from_hf} -> {made}; train on from it with --load {args.save} --finetune")
        else:
            dtype = getattr(torch, args.dtype) if args.dtype else None
            shard = int(args.max_shard_size * 1e9)
            read = export_hf(args.load, args.to_hf, dtype, shard, args.tokenizer)
            print(f"{read} -> {args.to_hf}")
    except (ValueError, OSError, SafetensorError) as error:
        print(f"convert: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
