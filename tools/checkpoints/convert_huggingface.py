# SPDX-License-Identifier: Apache-2.0
"""Convert a Hugging Face Llama to a checkpoint, or a checkpoint to a Hugging Face directory.

One tensor is in memory at a time. The output is complete or absent.
"""

from pathlib import Path

import torch

from model.llama import LlamaConfig
from model.load import ModelFile, model_file_of, read_sizes, saved_config
from mpu.context import LayerContext
from mpu.grid import Grid
from tools.checkpoints.copy import counted, open_newest, save_new, warn
from training.checkpoint import Checkpoint, refuse_to_save, weight_pieces
from training.checkpoint.header import BY_NAME
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.stream import stream
from training.checkpoint.write_huggingface import write_huggingface
from training.data.tokenizer import tokenizer_of
from training.files.owned import empty, refuse
from training.run.export import (
    TOKEN_IDS,
    exported_tokenizer,
    not_for_transformers,
    tokenizer_files,
)
from training.run.waiting import Progress


def expected_tensors(file: ModelFile, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return {canonical name: full shape} of a model, without allocating it."""
    grid = Grid()
    model = file.Model(config, LayerContext(grid, device=torch.device("meta")))
    pieces = weight_pieces(model, file.hf_names(model), grid)
    return {piece.name: piece.shape for piece in pieces}


def check_shapes(found: Checkpoint, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless every tensor of the model exists with its shape."""
    found.known_as(expected)
    for name, shape in expected.items():
        if name not in found.index:
            raise ValueError(
                f"{found.directory}: the tensor {name} is missing{found.instead_of(name)}"
            )
        there = found.index[name]["shape"]
        if tuple(there) != shape:
            raise ValueError(
                f"{found.directory}: {name} has shape {there}; its config asks for {list(shape)}"
            )


def import_hf(
    source: Path, root: Path, own: str | None = None, progress: Progress | None = None
) -> Path:
    """Write a Hugging Face directory as a checkpoint of step 0; return the new directory.

    own: the file of a fork, here and in `export_hf`. progress: counts the written bytes.
    """
    found = open_newest(source, hashed=False, flag="--from-hf", own=own)
    if not isinstance(found, HuggingFaceDirectory):
        raise ValueError(
            f"--from-hf {source} holds checkpoints of Weft: --load reads them as they are, and "
            "--to-hf writes Hugging Face's"
        )
    file = model_file_of(found.config, own=own)
    config = read_sizes(file, found.config)
    expected = expected_tensors(file, config)
    check_shapes(found, expected)
    found.check_names(expected)
    if found.left_out:
        warn(f"{source}: {found.left_out}")
    found.verify(found.manifest["files"])
    dtype = str(BY_NAME[found.index[next(iter(expected))]["dtype"]]).removeprefix("torch.")
    ids = {k: found.config[k] for k in TOKEN_IDS if found.config.get(k) is not None}
    files = tokenizer_files(found.directory)
    state = {
        **found.state,
        "hf_config": {**file.hf_config(config, dtype), **ids},
        **tokenizer_of(files),
    }
    pieces = stream(found, expected)
    progress = progress or Progress()
    return save_new(root, pieces, progress, step=0, state=state, attach=files)


def export_hf(
    place: Path,
    target: Path,
    dtype: torch.dtype | None,
    shard_bytes: int,
    tokenizer: Path | None,
    own: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the newest whole checkpoint as a Hugging Face directory; return the directory read."""
    refuse("--to-hf", target, empty, "an empty directory")
    refuse_to_save(target, "--to-hf")
    progress = progress or Progress()
    found = open_newest(place, hashed=True, progress=progress, flag="--load", own=own)
    if "hf_config" not in found.state:
        raise ValueError(f"{found.directory}: state.json has no hf_config, the model's sizes")
    sizes, saved = found.state["hf_config"], found.state.get("config")
    file = model_file_of(sizes, saved, own)
    expected = expected_tensors(file, saved_config(file, sizes, saved))
    check_shapes(found, expected)
    if why := not_for_transformers(sizes, expected):
        warn(f"--to-hf {target}: {why}")
    write_huggingface(
        target, found, list(expected), lambda: exported_tokenizer(found, tokenizer),
        dtype=dtype, shard_bytes=shard_bytes, grid=Grid(),
        arrange=lambda pieces: counted(pieces, progress),
    )  # fmt: skip
    return found.directory
