# SPDX-License-Identifier: Apache-2.0
"""Read the weights of a Hugging Face directory without trusting it, one tensor at a time.

The index may name only plain .safetensors files beside it, every tensor must be where the index
says and have the shape that config.json asks for, and there must be no tensor too many. Files that
are pickles are not read.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from training.checkpoint.pieces import DTYPES, NamedPiece, whole

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


class HuggingFaceDirectory:
    """The safetensors of a Hugging Face directory, checked against its index. Raises ValueError."""

    def __init__(self, root: Path) -> None:
        if not (root / "config.json").is_file():
            raise ValueError(f"--from-hf {root}: there is no config.json")
        self.root = root
        self.config = read_json(root / "config.json")
        self.tensors: dict[str, tuple[Path, tuple[int, ...], str]] = {}
        index = root / "model.safetensors.index.json"
        listed = None
        if index.is_file():
            listed = self._weight_map(index)
            names = sorted(set(listed.values()))
        elif (root / "model.safetensors").is_file():
            names = ["model.safetensors"]
        elif any(root.glob("*.bin")) or any(root.glob("*.bin.index.json")):
            raise ValueError(
                f"--from-hf {root} has .bin weights only: they are pickles, which can run code; "
                "save the model as safetensors (save_pretrained's default) and convert that"
            )
        else:
            raise ValueError(
                f"--from-hf {root}: there is no model.safetensors, nor an index of shards"
            )
        for name in names:
            self._read_header(root / name)
        for name, file in (listed or {}).items():
            found = self.tensors.get(name)
            if found is None or found[0].name != file:
                raise ValueError(f"{index} lists {name} in {file}, which does not hold it")
        for name, (path, _, _) in self.tensors.items():
            if listed is not None and name not in listed:
                raise ValueError(f"{path} holds {name}, which {index.name} does not list")

    @staticmethod
    def _weight_map(index: Path) -> dict[str, str]:
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ValueError(f"{index} has no weight_map")
        for name, file in listed.items():
            if not isinstance(file, str) or not SHARD.fullmatch(file):
                raise ValueError(
                    f"{index}: {name} is said to be in {file!r}, which is not the plain name of a "
                    ".safetensors file beside the index"
                )
            if not (index.parent / file).is_file():
                raise ValueError(f"{index} lists {file}, which is not there")
        return listed

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    entry = file.get_slice(name)
                    if name in self.tensors:
                        raise ValueError(
                            f"{path} and {self.tensors[name][0].name} both hold {name}"
                        )
                    self.tensors[name] = (path, tuple(entry.get_shape()), entry.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a sound safetensors file: {error}") from None

    def check(self, expected: dict[str, tuple[int, ...]], tied: bool) -> None:
        """Compare names, shapes and dtypes with those of the model that config.json describes."""
        for name, shape in expected.items():
            if name not in self.tensors:
                raise ValueError(f"{self.root}: the tensor {name} is missing")
            _, found, dtype = self.tensors[name]
            if found != shape:
                raise ValueError(
                    f"{self.root}: {name} has shape {list(found)}; config.json asks for "
                    f"{list(shape)}"
                )
            if dtype not in BY_NAME:
                raise ValueError(
                    f"{self.root}: {name} is {dtype}; only {', '.join(BY_NAME)} are converted"
                )
        for name in self.tensors.keys() - expected.keys():
            if name.endswith("rotary_emb.inv_freq"):  # derived; old Llama 2 directories carry it
                continue
            if name == "lm_head.weight" and tied:
                if not torch.equal(self.get(name), self.get("model.embed_tokens.weight")):
                    raise ValueError(
                        f"{self.root}: config.json ties the embeddings (tie_word_embeddings), but "
                        "lm_head.weight differs from model.embed_tokens.weight"
                    )
                continue
            raise ValueError(f"{self.root}: {name} is no tensor of the Llama in config.json")

    def get(self, name: str) -> Tensor:
        """Read one tensor."""
        with safe_open(str(self.tensors[name][0]), framework="pt") as file:
            return file.get_tensor(name)

    def piece(self, name: str) -> NamedPiece:
        """Make a piece whose data is read when it is written."""
        _, shape, dtype = self.tensors[name]
        blank = torch.empty(shape, dtype=BY_NAME[dtype], device="meta")
        return whole(name, blank, lambda: self.get(name))
