# SPDX-License-Identifier: Apache-2.0
"""Open a Hugging Face directory as if a run had saved it, without trusting it.

It is a Checkpoint whose index is made from the headers of its safetensors files, so that any layout
reads only the slices it needs. There are no hashes to verify. Instead it is checked that the files
are plain, have a trusted owner, have the sizes that their headers ask for, and hold what the
index lists and the model needs. Pickles are not read.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from training.checkpoint.errors import CheckpointError
from training.checkpoint.files import check_size, open_directory, open_plain
from training.checkpoint.header import HEADER_LIMIT, NAMES, read_header
from training.checkpoint.load import Checkpoint, OneOfFused
from training.checkpoint.manifest import parse

CONFIG, SINGLE, SHARDS = "config.json", "model.safetensors", "model.safetensors.index.json"
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
LIMITS = {CONFIG: 1 << 20, SHARDS: HEADER_LIMIT}  # most bytes of a JSON file
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DERIVED = "rotary_emb.inv_freq"  # computed from the config; old Llama 2 directories carry it
FUSED = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")
OF_FUSED = {  # (fused tensor, whether in a Mixtral): the modules of an expert that it holds
    ("gate_up_proj", False): ("gate_proj", "up_proj"),
    ("down_proj", False): ("down_proj",),
    ("gate_up_proj", True): ("w1", "w3"),
    ("down_proj", True): ("w2",),
}
Read = TypeVar("Read")
ROWS = 1024  # of two embeddings, compared at a time


class HuggingFaceDirectory(Checkpoint):
    """The weights of a Hugging Face directory. Raises CheckpointError naming the file and the rule.

    from_hf: converts any Llama's config.json to the form of our checkpoints. state: {"hf_config":
    the result, "iteration": 0, "consumed_samples": 0}. config: config.json as it is. A second copy
    of tied embeddings is not in the index; verify() compares it.
    """

    def __init__(
        self, directory: Path, from_hf: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> None:
        self.directory, self.step = directory.resolve(), 0
        self._boxes = {}
        self._fused: dict[str, tuple[str, int, int, int]] = {}
        try:
            self._at = open_directory(self.directory, self)
            self.config = read_json(self.directory / CONFIG)
            self.index, self.manifest = {}, {"step": 0, "files": {}}
            self._read_headers()
            self._cut_fused()
            sizes = spelt(self.config, CONFIG, from_hf)
        except CheckpointError as error:
            hint = ""
            if str(error).endswith("is a link"):
                hint = ": copy the files of Hugging Face's cache with cp -rL and use the copy"
            raise CheckpointError(f"{directory}: {error}{hint}") from None
        self.state = {"iteration": 0, "consumed_samples": 0, "hf_config": sizes}
        self.index = {n: entry for n, entry in self.index.items() if not n.endswith(DERIVED)}
        tied = self.config.get("tie_word_embeddings") and EMBEDDING in self.index
        self._copy = self.index.pop(HEAD, None) if tied else None

    def _read_headers(self) -> None:
        listed = None
        if os.path.lexists(self.directory / SHARDS):
            listed = read_weight_map(self.directory / SHARDS)
            files = sorted(set(listed.values()))
        elif os.path.lexists(self.directory / SINGLE):
            files = [SINGLE]
        elif any(n.endswith((".bin", ".bin.index.json")) for n in os.listdir(self.directory)):
            raise CheckpointError(
                "there are .bin weights only: they are pickles, which can run code; save the model "
                "as safetensors (save_pretrained's default)"
            )
        else:
            raise CheckpointError(f"there is no {SINGLE}, nor an index of shards")
        for file in files:
            size, header = read_header(self.directory / file)
            self.manifest["files"][file] = {"size": size}
            for name, (dtype, shape) in header.items():
                if name in self.index:
                    raise CheckpointError(f"{file} and {self.file_of(name)} both hold {name}")
                parts = [[file, name, [0] * len(shape), shape]]
                self.index[name] = {"dtype": dtype, "shape": shape, "parts": parts}
        for name, file in (listed or {}).items():
            if name not in self.index or self.file_of(name) != file:
                raise CheckpointError(f"{SHARDS} lists {name} in {file}, which does not hold it")
        for name in self.index:
            if listed is not None and name not in listed:
                raise CheckpointError(
                    f"{self.file_of(name)} holds {name}, which {SHARDS} does not list"
                )

    def _cut_fused(self) -> None:
        """Enter each expert of a fused tensor under its own name, as transformers splits it.

        A state dict of transformers 5 has experts.gate_up_proj [E, 2f, h] and experts.down_proj
        [E, h, f], and a Mixtral's block_sparse_moe is named mlp there.
        """
        mixtral = self.config.get("model_type") == "mixtral"
        for name in [name for name in self.index if FUSED.fullmatch(name)]:
            entry = self.index[name]
            before, kind = name.rsplit(".experts.", 1)
            if mixtral:
                before = f"{before.removesuffix('mlp')}block_sparse_moe"
            own = OF_FUSED[kind, mixtral]
            if len(entry["shape"]) != 3 or entry["shape"][1] % len(own):
                raise CheckpointError(
                    f"{name} has shape {entry['shape']}: the experts' matrices of {kind} are "
                    "[experts, rows, columns]" + ", rows of gate and up" * (len(own) > 1)
                )
            del self.index[name]
            file, (experts, rows, columns) = entry["parts"][0][0], entry["shape"]
            if len(self._fused) + experts * len(own) > NAMES:
                raise CheckpointError(
                    f"{name} has {experts:,} experts: {NAMES:,} matrices of experts are read"
                )
            rows //= len(own)
            for e in range(experts):
                for i, module in enumerate(own):
                    key = f"{name}[{e}, {i}]"
                    self._fused[key] = name, e, i * rows, rows
                    parts = [[file, key, [0, 0], [rows, columns]]]
                    one = {"dtype": entry["dtype"], "shape": [rows, columns], "parts": parts}
                    self.index[f"{before}.experts.{e}.{module}.weight"] = one
        if self._fused and mixtral:
            for name in [name for name in self.index if name.endswith(".mlp.gate.weight")]:
                there = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
                self.index[there] = self.index.pop(name)

    def stored(self, file: Any, key: str) -> Any:
        """Return the stored tensor `key` of an open file, or one expert's part of a fused one."""
        if key not in self._fused:
            return super().stored(file, key)
        name, *where = self._fused[key]
        return OneOfFused(file.get_slice(name), *where)

    def file_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return str(self.index[name]["parts"][0][0])

    def check_names(self, names: Collection[str]) -> None:
        """Raise CheckpointError for a tensor that the model lacks, which nobody would read.

        names: the canonical names of the whole model, of all its pipeline stages.
        """
        for name in self.index:
            if name not in names:
                raise CheckpointError(
                    f"{self.directory}: {name} is not a tensor of the Llama in {CONFIG}"
                )

    def verify(self, names: Iterable[str], finite: bool = True) -> None:
        """Check that files still have the sizes that their headers asked for.

        Values are looked at as they are read. With the embedding's file in `names`, also compare
        the second copy of tied embeddings.
        """
        names = list(names)
        for name in names:
            check_size(self.directory / name, self.manifest["files"][name]["size"])
        if self._copy is not None and self.file_of(EMBEDDING) in names:
            self._compare(self.index[EMBEDDING], self._copy)

    def _compare(self, entry: dict[str, Any], copy: dict[str, Any]) -> None:
        """Raise CheckpointError unless two tensors are equal. Read ROWS rows at a time."""
        same = (entry["dtype"], entry["shape"]) == (copy["dtype"], copy["shape"])
        files = [str(self.directory / e["parts"][0][0]) for e in (entry, copy)]
        try:
            with safe_open(files[0], "pt") as one, safe_open(files[1], "pt") as other:
                a, b = one.get_slice(EMBEDDING), other.get_slice(HEAD)
                for row in range(0, entry["shape"][0] if same else 0, ROWS):
                    same = same and torch.equal(a[row : row + ROWS], b[row : row + ROWS])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.directory}: {HEAD}: {error}") from None
        if not same:
            raise CheckpointError(
                f"{self.directory}: {CONFIG} ties the embeddings (tie_word_embeddings), but {HEAD} "
                f"differs from {EMBEDDING}"
            )


def spelt(config: dict[str, Any], name: str, read: Callable[[dict[str, Any]], Read]) -> Read:
    """Return read(config). Raises CheckpointError, naming the file, for what it cannot read."""
    try:
        return read(config)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:  # a model's file reads it, which may be anybody's
        raise CheckpointError(f"{name}: missing or bad field: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that somebody else wrote, within LIMITS. Raises CheckpointError."""
    limit = LIMITS.get(path.name, HEADER_LIMIT)
    with open_plain(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path.name} is larger than {limit:,} bytes")
    return parse(data, path.name, foreign=True)


def read_weight_map(path: Path) -> dict[str, str]:
    """Return {tensor: file} of an index. Raises CheckpointError for a file elsewhere."""
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path.name} has no weight_map")
    if len(listed) > NAMES:
        raise CheckpointError(f"{path.name} lists {len(listed):,} tensors; {NAMES:,} are read")
    for name, file in listed.items():
        if not isinstance(file, str) or not PLAIN.fullmatch(file):
            raise CheckpointError(
                f"{path.name}: {name} is listed in {file!r}, which is not the plain name of a "
                ".safetensors file next to the index"
            )
        if not os.path.lexists(path.parent / file):
            raise CheckpointError(f"{path.name} lists {file}, which is not there")
    return listed
