# SPDX-License-Identifier: Apache-2.0
"""Fill local tensors from the files that hold their rectangles, whatever layout wrote them.

A checkpoint describes tensors and rectangles, not ranks. A wanted rectangle is intersected with
every stored one of the same tensor, and only the intersections are read. In any layout the bits are
those that were saved, unless the dtype changes.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpu.grid import Grid
from training.checkpoint.agree import first_error, together
from training.checkpoint.errors import CheckpointError, MismatchError
from training.checkpoint.evaluated import evaluation_in
from training.checkpoint.files import check_file, check_size, open_directory
from training.checkpoint.finite import check_tensors, fault_of
from training.checkpoint.header import check_header
from training.checkpoint.manifest import (
    INDEX,
    STATE,
    check_index,
    intersection,
    read_manifest,
    read_part,
    volume,
)
from training.checkpoint.pieces import NamedPiece, dtype_name, is_state
from training.files.untrusted import SHOWN, first_of

# Fields that may differ between a checkpoint's model and the run's: no tensor depends on them.
FREE_FIELDS = ("architectures", "torch_dtype", "initializer_range", "max_position_embeddings")
FLAGS = {
    "model_type": "--model-file or --num-experts",
    "vocab_size": "--vocab-size or the tokenizer",
    "hidden_size": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size",
    "num_hidden_layers": "--num-layers",
    "num_attention_heads": "--num-attention-heads",
    "num_key_value_heads": "--num-query-groups",
    "head_dim": "--kv-channels",
    "rope_theta": "--rotary-base",
    "rope_scaling": "--use-rope-scaling",
    "rope_parameters": "--rotary-base",
    "rms_norm_eps": "--norm-epsilon",
    "tie_word_embeddings": "--untie-embeddings-and-output-weights",
    "logits_scaling": "--mup-base-hidden-size or --mup-output-mult",
    "attention_multiplier": "--mup-base-head-dim",
    "embedding_multiplier": "--mup-embedding-mult",
}
MUP_FIELDS = ("logits_scaling", "attention_multiplier", "embedding_multiplier")
# types of the state's entries that a resume reads
COUNTS = ("iteration", "consumed_samples", "consumed_tokens", "optimizer_steps")
STATE_TYPES: dict[str, type] = dict.fromkeys(("numerics", *COUNTS), int)
PASSED_OVER = 10_000  # most iterations that a run may have passed over
LOOKED_AT = 1000  # most names that are searched for the most similar ones
DICTS = ("config", "hf_config", "tp_comm_overlap", "layout", "branched_from")
STATE_TYPES |= dict.fromkeys(DICTS, dict)
STATE_TYPES |= dict.fromkeys(("tokenizer_digest", "corpus_digest", "tokenizer_type"), str)


def instead_of(name: str, there: Collection[str]) -> str:
    """Return the names in a checkpoint that may mean a missing one, to end a message."""
    if wrapped := [n for n in there if n.endswith(f".{name}")]:
        wrapper = wrapped[0].removesuffix(name)
        return f"; there is {wrapped[0]}: save the model without its wrapper ({wrapper!r})"
    some = list(islice(there, LOOKED_AT))
    near = get_close_matches(name, some, SHOWN)
    return f"; closest names: {', '.join(near)}" if near else f"; it has {first_of(some) or 'none'}"


class OneOfFused:
    """The matrix of one expert in a fused tensor: rows of stored[expert], read slice by slice."""

    def __init__(self, stored: Any, expert: int, first: int, rows: int) -> None:
        self._stored, self._expert, self._first, self._rows = stored, expert, first, rows

    def get_shape(self) -> list[int]:
        """Return [rows, columns]."""
        return [self._rows, self._stored.get_shape()[2]]

    def get_dtype(self) -> str:
        """Return the dtype by safetensors' name."""
        dtype: str = self._stored.get_dtype()
        return dtype

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        rows, columns = at
        here = slice(self._first + rows.start, self._first + rows.stop)
        found: Tensor = self._stored[self._expert : self._expert + 1, here, columns]
        return found[0]


class Checkpoint:
    """One directory, its JSON files read and checked. Raises CheckpointError if not complete.

    state: the contents of state.json. index: {tensor: {"dtype", "shape", "parts"}}. passed_over:
    newer directories that were not complete. links: whether files may be links (open_plain()).
    left_out: a line on tensors that do not belong to the model and are not read, "" if none.
    """

    passed_over: Sequence[str] = ()
    left_out = ""
    links = False  # whether its files may be links

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._boxes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._at = open_directory(directory, self)
        self.manifest = read_manifest(directory, self._at)
        self.step: int = self.manifest["step"]
        self.index: dict[str, Any] = read_part(self._at, self.manifest, INDEX)
        self.state: dict[str, Any] = read_part(self._at, self.manifest, STATE)
        if self.state.get("step") != self.step:
            raise CheckpointError(f"{STATE} is not of step {self.step}")
        check_state(self.state)
        check_index(self.index, self.manifest)

    def weights(self) -> list[str]:
        """Return the names of the weights: all tensors that are not optimizer state."""
        return [name for name in self.index if not is_state(name, self.index)]

    def check_sizes(self, names: Iterable[str] | None = None) -> None:
        """Raise CheckpointError if the size of a file is not the manifest's. None: check all files,
        on one rank.
        """
        files = self.manifest["files"]
        for name in files if names is None else names:
            check_size(self._at / name, files[name]["size"], self.links)

    def check_model(
        self, expect: Mapping[str, Any], respell: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> None:
        """Raise MismatchError at the first field in which the saved model differs from `expect`.

        respell: converts the saved fields to the form in which the run's model file writes them. If
        it fails, as it may for another model, they are compared only as they were saved.
        """
        saved, again = self.state.get("hf_config", {}), dict[str, Any]()
        with suppress(Exception):  # it may be of any fork's model file
            again = respell(saved)
        mup = [f for f in MUP_FIELDS if saved and (f in saved) != (f in expect)]
        if mup and "model_type" in expect:
            there, here = ("with", "without")[:: 1 if mup[0] in saved else -1]
            raise MismatchError(
                f"{self.directory} is a checkpoint of another model: it was trained {there} the "
                f"multipliers of muP, and this run is {here} them (--use-mup)"
            )
        for field, value in expect.items():
            if field not in saved or field in FREE_FIELDS:
                continue
            if not any(same_value(side[field], value) for side in (saved, again) if field in side):
                more = "; --allow-change rope allows it" if "rope" in field else ""
                raise MismatchError(
                    f"{self.directory} is a checkpoint of another model: {field} is "
                    f"{saved[field]!r} there and {value!r} here ({FLAGS.get(field, 'model')}){more}"
                )

    def check_tensors(self, pieces: Iterable[NamedPiece], cast: bool) -> None:
        """Raise MismatchError if a piece is missing, of another shape or (no `cast`) dtype."""
        for piece in self._there(pieces):
            entry = self.index.get(piece.name)
            if entry is None:
                if is_state(piece.name, self.index):
                    raise MismatchError(
                        f"{self.directory} lacks optimizer state ({piece.name}): give --finetune "
                        "or --no-load-optim to take the weights only"
                    )
                raise MismatchError(
                    f"{self.directory} is a checkpoint of another model: it has no {piece.name}"
                    + self.instead_of(piece.name)
                )
            if tuple(entry["shape"]) != piece.shape:
                raise MismatchError(
                    f"{self.directory} is a checkpoint of another model: {piece.name} has shape "
                    f"{entry['shape']} there and {list(piece.shape)} here"
                )
            here = dtype_name(piece.tensor.dtype)
            if entry["dtype"] != here and not cast:
                raise MismatchError(
                    f"{self.directory}: {piece.name} was saved in {entry['dtype']} and this run "
                    f"keeps it in {here}: resume in the saved precision, or give --finetune"
                )

    def known_as(self, names: Collection[str]) -> None:
        """Adopt the model's names of tensors; a directory of another program may have others."""

    def instead_of(self, name: str) -> str:
        """Return the stored tensors that may be a missing one, to end a message."""
        return instead_of(name, self.index)

    def _there(self, pieces: Iterable[NamedPiece]) -> Iterator[NamedPiece]:
        """Yield the pieces, an optional one only as far as the checkpoint has it."""
        pieces = list(pieces)
        self.known_as({piece.name for piece in pieces})
        for piece in pieces:
            entry = self.index.get(piece.name)
            if not piece.optional or entry and tuple(entry["shape"]) == piece.shape:
                yield piece
            elif entry and tuple(entry["shape"][:-1]) == piece.shape[:-1]:
                shape = tuple(entry["shape"])
                tensor = piece.tensor[..., : shape[-1]]
                sizes = tuple(tensor.shape)
                yield replace(piece, shape=shape, sizes=sizes, tensor=tensor)

    def stored(self, file: Any, key: str) -> Any:
        """Return the stored tensor `key` of an open file, which is read slice by slice."""
        return file.get_slice(key)

    def parts(self, piece: NamedPiece) -> list[list[Any]]:
        """List the stored rectangles that overlap a piece: [file, key, starts, sizes]."""
        parts = self.index[piece.name]["parts"]
        if piece.name not in self._boxes:
            table = np.array([part[2:] for part in parts], np.int64)  # [parts, 2, dimensions]
            self._boxes[piece.name] = table[:, 0], table[:, 0] + table[:, 1]
        low, high = self._boxes[piece.name]
        begin = np.array(piece.starts, np.int64)
        meet = np.maximum(low, begin) < np.minimum(high, begin + np.array(piece.sizes, np.int64))
        return [parts[i] for i in np.flatnonzero(meet.all(axis=1))]

    @cached_property
    def _rows(self) -> dict[str, list[tuple[str, str, list[int]]]]:
        """Return {file: [(key, dtype, shape)]}: the contents of each file by the index."""
        found: dict[str, list[tuple[str, str, list[int]]]] = {n: [] for n in self.manifest["files"]}
        for entry in self.index.values():
            for file, key, _, sizes in entry["parts"]:
                found[file].append((key, entry["dtype"], sizes))
        return found

    def files_of(self, pieces: Iterable[NamedPiece]) -> list[str]:
        """List the files that hold the pieces, sorted by name."""
        return sorted({part[0] for p in self._there(pieces) for part in self.parts(p)})

    def verify(self, names: Iterable[str], finite: bool = True) -> None:
        """Hash files, several at a time, and compare their headers with the index.

        finite: check their values too (finite.py).
        Raises CheckpointError naming the first file that is not as written, or holds a NaN.
        """
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for task in [pool.submit(self.verify_file, name, finite) for name in names]:
                task.result()

    def verify_file(self, name: str, finite: bool = True, sha256: bool = False) -> None:
        """Do what `verify` does to one file. sha256: compare that sum (files.py)."""
        check_file(self._at / name, self.manifest["files"][name], sha256)
        if name.endswith(".safetensors"):
            check_header(self._at / name, self._rows[name])
            if finite:
                check_tensors(self._at / name)

    @torch.no_grad()
    def read(self, pieces: Iterable[NamedPiece], finite: bool = True) -> None:
        """Fill the pieces' tensors, converting dtypes that differ. Call verify() before.

        finite: raise CheckpointError if a value is not finite.
        """
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for piece in self._there(pieces):
                filled, dtype = 0, self.index[piece.name]["dtype"]
                for file, key, starts, sizes in self.parts(piece):
                    try:
                        if file not in files:
                            opened = safe_open(str(self._at / file), framework="pt")
                            files[file] = stack.enter_context(opened)
                        stored = self.stored(files[file], key)
                        filled += _fill(
                            piece, files[file], stored,
                            key=key, starts=starts, sizes=sizes, dtype=dtype,
                        )  # fmt: skip
                    except (OSError, SafetensorError, CheckpointError) as error:
                        raise CheckpointError(f"{self.directory / file}: {key}: {error}") from None
                if filled != piece.tensor.numel():
                    raise CheckpointError(
                        f"{self.directory}: {INDEX} covers {filled} of the {piece.tensor.numel()} "
                        f"elements of {piece.name}"
                    )
                if finite and (fault := fault_of(piece.tensor)):  # no verify() looked at its values
                    raise CheckpointError(f"{self.directory}: {piece.key}: {fault}")


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values of a config.json are the same, numbers up to fp32's rounding: some
    programs write them in fp32, and others compute them in another order.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[k], other[k]) for k in one)
    if float in (type(one), type(other)) and {type(one), type(other)} <= {int, float}:
        return math.isclose(one, other, rel_tol=1e-7)
    return bool(one == other)


def check_state(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an entry of another type than a resume or a tool expects."""
    for name, kind in STATE_TYPES.items():
        value = state.get(name, kind())
        optional = name == "tokenizer_type" and value is None
        if not optional and (type(value) is not kind or (isinstance(value, int) and value < 0)):
            what = "an int >= 0" if kind is int else f"a {kind.__name__}"
            raise CheckpointError(f"{STATE}: {name} must be {what}")
    passed = state.get("passed_over", [])
    sound = type(passed) is list and len(passed) <= PASSED_OVER
    if not sound or any(type(i) is not int or i < 1 for i in passed):
        raise CheckpointError(
            f"{STATE}: passed_over must be a list of at most {PASSED_OVER:,} iterations, from 1"
        )
    frozen = state.get("frozen_parameters", [])
    if type(frozen) is not list or any(type(name) is not str for name in frozen):
        raise CheckpointError(f"{STATE}: frozen_parameters must be a list of names")
    evaluation_in(state)
    stages = state.get("stages", [])
    kinds = {"name": str, "first_sample": int, "corpus": str, "seq_length": int}
    if type(stages) is not list or any(
        type(stage) is not dict or any(type(stage.get(k)) is not kind for k, kind in kinds.items())
        for stage in stages
    ):
        raise CheckpointError(f"{STATE}: stages must hold objects with {', '.join(kinds)}")
    counts = {f"layout.{axis}": size for axis, size in state.get("layout", {}).items()}
    overlap = state.get("tp_comm_overlap", {})
    choices = overlap.get("choices", {}) if overlap.get("choices") is not None else {}
    if any(type(n) is not int or n < 1 for n in counts.values()):
        raise CheckpointError(f"{STATE}: layout must hold counts of ranks")
    if type(choices) is not dict or any(type(c) is not str for c in choices.values()):
        raise CheckpointError(f"{STATE}: tp_comm_overlap must hold names of methods")
    model = state.get("tokenizer_model")
    if model is not None and type(model) is not str:
        raise CheckpointError(f"{STATE}: tokenizer_model must be a str")


def _fill(
    piece: NamedPiece, file: Any, stored: Any, key: str, starts: Any, sizes: Any, dtype: str
) -> int:
    """Copy the intersection of a stored rectangle and a piece; return its number of elements."""
    shared = intersection(starts, sizes, piece.starts, piece.sizes)
    assert shared is not None
    if list(stored.get_shape()) != list(sizes):
        raise CheckpointError(f"its shape is {stored.get_shape()} where {INDEX} says {sizes}")
    if stored.get_dtype() != dtype:
        raise CheckpointError(f"it is {stored.get_dtype()} where {INDEX} says {dtype}")
    plain = not isinstance(stored, OneOfFused)
    if plain and list(shared[1]) == list(sizes):  # all of it: no copy in between
        data: Tensor = file.get_tensor(key)
    else:
        at = tuple(slice(a - b, a - b + n) for a, n, b in zip(*shared, starts, strict=True))
        data = stored[at]
    target = piece.tensor
    for dim, (start, size) in enumerate(zip(*shared, strict=True)):
        target = target.narrow(dim, start - piece.starts[dim], size)
    target.copy_(data)
    return volume(shared[1])


def load(
    checkpoint: Checkpoint,
    pieces: Sequence[NamedPiece],
    grid: Grid,
    device: torch.device | None = None,
) -> None:
    """Fill the pieces of every rank. Collective: all raise CheckpointError if one rank fails."""
    failed = first_error(together(lambda: checkpoint.read(pieces), grid.world, device))
    if failed is not None:
        raise CheckpointError(f"rank {failed.rank}: {failed.error}")
