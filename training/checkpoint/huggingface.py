# SPDX-License-Identifier: Apache-2.0
"""Open a Hugging Face directory as if a run had saved it, without trusting it.

It is a Checkpoint whose index is made from the headers of its safetensors files, so that any layout
reads only the slices it needs. The choice of files, and the tensor of each name, are those of
transformers' from_pretrained (5.24); an index of shards lists the files, and their headers list the
tensors. There are no hashes to verify. Instead the files must be plain, have a trusted owner, have
the sizes that their headers require, and hold the model's tensors and nothing else. Pickles are not
read.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from training.checkpoint.errors import CheckpointError
from training.checkpoint.files import open_directory, open_plain
from training.checkpoint.header import BY_NAME, read_header
from training.checkpoint.load import Checkpoint, OneOfFused
from training.checkpoint.manifest import parse
from training.checkpoint.pieces import HEADER_LIMIT, NAMES
from training.files.untrusted import first_of

CONFIG, SINGLE, SHARDS = "config.json", "model.safetensors", "model.safetensors.index.json"
PLAIN = re.compile(r"\w[\w .()+,@=-]*\.safetensors")
LIMITS = {CONFIG: 1 << 20, SHARDS: HEADER_LIMIT}  # most bytes of a JSON file
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
BASE = "model."  # prefix of the names of transformers' base model in its CausalLM
DERIVED = re.compile(r"(.*\.)?rotary_emb\..*")  # tables computed from the config; Llama 2 has them
FUSED = re.compile(r"(.*)\.(mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)")
BESIDE = r"adapter_config\.json|shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"
KINDS = {  # {pattern of files that are not read as weights: what they are, and what to do}
    r"adapter_(config\.json|model\..*)": "an adapter, which transformers adds to its base model "
    "if peft is installed: merge it (merge_and_unload) and save the merged model",
    r"shard-\d{5}-model-.*|pytorch_model_fsdp_\d+|.*\.distcp": "a distributed save, which is not "
    "read: save the model in one file",
    r"model-\d+-of-\d+\.safetensors": f"shards without {SHARDS}, which names them",
    r"model\.[^.]+\.safetensors|model\.safetensors\.index\.[^.]+\.json": "a variant, which "
    f"transformers reads only on request: rename its files to the plain names, such as {SINGLE}",
    r"pytorch_model.*": ".bin weights are pickles, which can run code, and are not read: save the "
    "model as safetensors (save_pretrained's default)",
    r"consolidated\..*": "weights under Meta's or Mistral's names: use those in Hugging Face's "
    "format",
    r".*\.gguf": "GGUF, which is not read: use the model's safetensors",
    r"global_step\d+|zero_to_fp32\.py": "DeepSpeed's save, of pickles, which are not read: run "
    "`python zero_to_fp32.py . OUT --safe_serialization` there, which writes safetensors",
    r"(flax|tf)_model\..*|(lit|rust)_model\..*": "another program's weights, which are not read: "
    "save the model with transformers' save_pretrained",
}
OF_FUSED = {  # (fused tensor, whether in a Mixtral): the modules of an expert that it holds
    ("gate_up_proj", False): ("gate_proj", "up_proj"),
    ("down_proj", False): ("down_proj",),
    ("gate_up_proj", True): ("w1", "w3"),
    ("down_proj", True): ("w2",),
}
PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers")  # of multi-token prediction
MOST_PREDICTORS = 16
NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?(e-?[0-9]{1,3})?", re.IGNORECASE)
Read = TypeVar("Read")
ROWS = 1024  # of two embeddings, compared at a time


class HuggingFaceDirectory(Checkpoint):
    """The weights of a Hugging Face directory. Raises CheckpointError naming the file and the rule.

    from_hf: converts any Llama's config.json to the form of our checkpoints. state: {"hf_config":
    the result, "iteration": 0, "consumed_samples": 0}. config: config.json, unchanged. A second
    copy of tied embeddings is not in the index; verify() compares it.
    """

    links = True  # as in Hugging Face's cache

    def __init__(
        self, directory: Path, from_hf: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> None:
        self.directory, self.step = directory.resolve(), 0
        self._boxes = {}
        self._fused: dict[str, tuple[str, int, int, int]] = {}
        try:
            self._at = open_directory(self.directory, self)
            there = sorted(os.listdir(self.directory))
            own = any(name in there for name in (CONFIG, SINGLE, SHARDS))
            if not own and (other := instead(there)):
                raise CheckpointError(f"there is no {CONFIG}, but {other}")
            self.config = read_json(self.directory / CONFIG)
            self.index, self.manifest = {}, {"step": 0, "files": {}}
            self._read_headers(weight_files(self.directory, self.config, there))
            self._cut_fused()
            sizes = spelt(self.config, CONFIG, from_hf)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from None
        self.state = {"iteration": 0, "consumed_samples": 0, "hf_config": sizes}
        self.index = {n: e for n, e in self.index.items() if not DERIVED.fullmatch(n)}
        self._leave_out_predictors()
        self.known_as((EMBEDDING, HEAD))
        head = self.index.pop(HEAD, None) if self.config.get("tie_word_embeddings") else None
        self._copy = head if EMBEDDING in self.index else None
        if head is not None:  # either name may have the one tensor
            self.index.setdefault(EMBEDDING, head)

    def _read_headers(self, files: Mapping[str, Collection[str]]) -> None:
        """Enter the tensors of the files from weight_files() into the index.

        If two files hold a tensor, the last one counts, as in transformers. Raises CheckpointError
        unless the index of shards lists the tensor in that file.
        """
        for file, listed in files.items():
            size, header = read_header(self.directory / file, self.links)
            self.manifest["files"][file] = {"size": size}
            for name, (dtype, shape) in header.items():
                if name in self.index and name not in listed:
                    raise CheckpointError(f"{file} and {self.file_of(name)} both hold {name}")
                parts = [[file, name, [0] * len(shape), shape]]
                self.index[name] = {"dtype": dtype, "shape": shape, "parts": parts}

    def _leave_out_predictors(self) -> None:
        """Remove layers of multi-token prediction from the index, as transformers does: they
        follow the model's own, and only config.json has their number (DeepSeek-V3).
        """
        counts = [self.config.get(name) for name in ("num_hidden_layers", *PREDICTORS)]
        layers, more = counts[0], next((n for n in counts[1:] if type(n) is int), 0)
        if type(layers) is not int or not 0 < more <= MOST_PREDICTORS:
            return
        first = tuple(f"{BASE}layers.{layers + i}." for i in range(more))
        mine = [name for name in self.index if name.startswith(first)]
        for name in mine:
            del self.index[name]
        if mine:
            self.left_out = (
                f"{len(mine)} tensors of multi-token prediction are left out: {mine[0]}, ..."
            )

    def _cut_fused(self) -> None:
        """Enter each expert of a fused tensor into the index, as transformers splits it.

        A state dict of transformers 5 has experts.gate_up_proj [E, 2f, h] and experts.down_proj
        [E, h, f], and a Mixtral's block_sparse_moe is named mlp there.
        """
        mixtral = self.config.get("model_type") == "mixtral"
        for name in [name for name in self.index if FUSED.fullmatch(name)]:
            entry = self.index[name]
            before, kind = name.rsplit(".experts.", 1)
            own = OF_FUSED[kind, mixtral]
            if len(entry["shape"]) != 3 or entry["shape"][1] % len(own):
                raise CheckpointError(
                    f"{name} has shape {entry['shape']}: the experts' matrices of {kind} are "
                    "[experts, rows, columns]" + ", the rows those of gate and up" * (len(own) > 1)
                )
            del self.index[name]
            file, (experts, rows, columns) = entry["parts"][0][0], entry["shape"]
            if len(self._fused) + experts * len(own) > NAMES:
                raise CheckpointError(
                    f"{name} has {experts:,} experts: a model may have at most {NAMES:,} matrices "
                    "of experts"
                )
            rows //= len(own)
            for e in range(experts):
                for i, module in enumerate(own):
                    key = f"{name}[{e}, {i}]"
                    self._fused[key] = name, e, i * rows, rows
                    parts = [[file, key, [0, 0], [rows, columns]]]
                    one = {"dtype": entry["dtype"], "shape": [rows, columns], "parts": parts}
                    self.index[f"{before}.experts.{e}.{module}.weight"] = one
        if mixtral:
            own = ".mlp.", ".block_sparse_moe."
            self.index = {name.replace(*own): entry for name, entry in self.index.items()}

    def known_as(self, names: Collection[str]) -> None:
        """Rename tensors in the index to the model's `names`, with or without BASE, as transformers
        reads the weights of a base model, and those of a CausalLM in a model around it.
        """
        for name in names:
            for other in (name.removeprefix(BASE), BASE + name):
                if name not in self.index and other not in names and other in self.index:
                    self.index[name] = self.index.pop(other)

    def stored(self, file: Any, key: str) -> Any:
        """Return the stored tensor `key` of an open file, or one expert's part of a fused one."""
        if key not in self._fused:
            return super().stored(file, key)
        name, *where = self._fused[key]
        return OneOfFused(file.get_slice(name), *where)

    def file_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return str(self.index[name]["parts"][0][0])

    def instead_of(self, name: str) -> str:
        """Return the same as Checkpoint's; for the embedding or the head, name the other one."""
        other, module = {HEAD: EMBEDDING, EMBEDDING: HEAD}.get(name), name.split(".")[-2:][0]
        known = any(there.startswith(BASE) for there in self.index)  # else they are named otherwise
        if other in self.index and known and not any(module in there for there in self.index):
            return f"; there is {other}, which {CONFIG} does not tie to it (tie_word_embeddings)"
        return super().instead_of(name)

    def check_names(self, names: Collection[str]) -> None:
        """Raise CheckpointError for a stored tensor that is not one of the model's.

        names: the canonical names of the whole model, of all its pipeline stages.
        """
        self.known_as(names)
        for name in self.index:
            if name not in names:
                raise CheckpointError(
                    f"{self.directory}: {name} is not a tensor of the Llama in {CONFIG}"
                )

    def verify(self, names: Iterable[str], finite: bool = True) -> None:
        """Check that files still have the sizes that their headers required.

        Values are checked when they are read. If the embedding's file is in `names`, also compare
        the second copy of tied embeddings.
        """
        names = list(names)
        self.check_sizes(names)
        if self._copy is not None and self.file_of(EMBEDDING) in names:
            self._compare(self.index[EMBEDDING], self._copy)

    def _compare(self, entry: dict[str, Any], copy: dict[str, Any]) -> None:
        """Raise CheckpointError unless two tensors have equal values. Read ROWS rows at a time."""
        same = entry["shape"] == copy["shape"]
        dtype = torch.promote_types(*(BY_NAME[e["dtype"]] for e in (entry, copy)))
        (file, name, *_), (other_file, other_name, *_) = (e["parts"][0] for e in (entry, copy))
        try:
            with (
                safe_open(str(self.directory / file), "pt") as one,
                safe_open(str(self.directory / other_file), "pt") as other,
            ):
                a, b = one.get_slice(name), other.get_slice(other_name)
                for row in range(0, entry["shape"][0] if same else 0, ROWS):
                    some = (side[row : row + ROWS].to(dtype) for side in (a, b))
                    same = same and torch.equal(*some)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.directory}: {HEAD}: {error}") from None
        if not same:
            raise CheckpointError(
                f"{self.directory}: {CONFIG} ties the embeddings (tie_word_embeddings), but {HEAD} "
                f"differs from {EMBEDDING}"
            )


def is_model(there: Collection[str]) -> bool:
    """Return whether a folder with these files looks like a model, readable here or not."""
    return bool(CONFIG in there or SINGLE in there or SHARDS in there or instead(there))


def instead(there: Iterable[str]) -> str:
    """Return the weights of other kinds among a folder's files, and what to do with them; "" if
    there are none.
    """
    for pattern, what in KINDS.items():
        if found := [name for name in there if re.fullmatch(pattern, name)]:
            return f"{first_of(found)}: {what}"
    return ""


def weight_files(
    directory: Path, config: dict[str, Any], there: Sequence[str]
) -> Mapping[str, Collection[str]]:
    """Return {file of weights: the tensors that an index lists in it}, as from_pretrained chooses
    and orders the files.

    there: the folder's files. config.json may name them (transformers_weights); else
    model.safetensors has priority over the index of shards. Raises CheckpointError if there are
    none, and for others that from_pretrained would read too.
    """
    named = config.get("transformers_weights")
    chosen = next((n for n in ([named] if named else (SINGLE, SHARDS)) if n in there), None)
    if chosen is None:
        missing = f"{CONFIG} names {named!r} (transformers_weights), which is not there"
        other = [n for n in there if n.endswith((".safetensors", ".bin", ".pt", ".pth"))]
        why = instead(there) or first_of(other)
        raise CheckpointError(
            (missing if named else f"there is neither {SINGLE} nor {SHARDS}")
            + (f", but {why}" if why else "")
        )
    if other := [name for name in there if re.fullmatch(BESIDE, name)]:
        raise CheckpointError(f"next to {chosen} there is {instead(other)}")
    return shards_of(directory / chosen, there) if chosen.endswith(".json") else {chosen: ()}


def spelt(config: dict[str, Any], name: str, read: Callable[[dict[str, Any]], Read]) -> Read:
    """Return read(config). Raises CheckpointError, naming the file, if that fails."""
    try:
        return read(config)
    except ValueError as error:
        raise CheckpointError(f"{error}{_texts(config, str(error))}") from None
    except Exception as error:  # `read` may be of any fork's model file
        why = f"{name}: missing or bad field: {error}"
        raise CheckpointError(f"{why}{_texts(config, why)}") from None


def _texts(config: dict[str, Any], why: str) -> str:
    """Return the fields, not named in `why`, that hold a number as text, to end a message."""
    found = [
        f"{field} is {value!r}"
        for field, value in dict.items(config)
        if isinstance(value, str) and NUMBER.fullmatch(value) and field not in why
    ]
    return f" ({first_of(found)}: a string, where a number may be meant)" if found else ""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of another program, within LIMITS. Raises CheckpointError."""
    limit = LIMITS.get(path.name, HEADER_LIMIT)
    with open_plain(path, links=True) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path.name} is larger than {limit:,} bytes")
    return parse(data, path.name, foreign=True)


def shards_of(path: Path, there: Sequence[str]) -> Mapping[str, Collection[str]]:
    """Return {file: its tensors} of an index, sorted by file. Raises CheckpointError for a file
    that is not `there`.
    """
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path.name} has no weight_map")
    if len(listed) > NAMES:
        raise CheckpointError(f"{path.name} lists {len(listed):,} tensors, more than {NAMES:,}")
    for name, file in listed.items():
        if not isinstance(file, str) or not PLAIN.fullmatch(file):
            raise CheckpointError(
                f"{path.name}: {name} is listed in {file!r}, which is not the plain name of a "
                ".safetensors file next to the index"
            )
    files: dict[str, set[str]] = {file: set() for file in sorted(set(listed.values()))}
    for name, file in listed.items():
        files[file].add(name)
    if lost := [name for name in files if name not in there]:
        here = first_of([name for name in files if name in there]) or "none"
        raise CheckpointError(
            f"{path.name} lists {first_of(lost)}, which {'is' if len(lost) == 1 else 'are'} not "
            f"there; of its {len(files)} files there are {here}"
        )
    return files
