# SPDX-License-Identifier: Apache-2.0
"""Read the weights of a Megatron `torch_dist` checkpoint of a dense Llama, unpickling nothing.

    iter_0000500/metadata.json     names the format
    iter_0000500/.metadata         a pickle: each tensor's shape, and where its parts lie
    iter_0000500/__R_W.distcp      those parts, one after another, each an archive of torch.save
    iter_0000500/common.pt         a pickle: how far the run is, among much else

All are read as data (inert_pickle.py). Of common.pt two numbers are taken: the iteration and the
samples consumed. Optimizer state and bytes (_extra_state, states of random numbers) are not
opened. The model's sizes come from a Hugging Face config.json. In Megatron's tensors all layers are
stacked along a dimension in front, or are numbered in the name; a query group's q, k and v stand
side by side, gate and up one after another; the vocabulary is padded.
"""

import io
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.llama import LlamaConfig
from model.load import ModelFile, model_file_of, read_sizes
from mpu.grid import Grid
from tools.checkpoints.copy import check_empty
from tools.checkpoints.huggingface import expected_tensors
from tools.checkpoints.inert_pickle import ANY, Record, read_inert
from training.checkpoint import CheckpointError, NamedPiece
from training.checkpoint import save as save_checkpoint
from training.checkpoint.files import open_plain
from training.checkpoint.huggingface import CONFIG, EMBEDDING, HEAD, read_json
from training.checkpoint.manifest import intersection, tiles
from training.checkpoint.pieces import whole
from training.data.tokenizer import tokenizer_of
from training.run.export import TOKEN_IDS, tokenizer_files

LATEST, FORMAT, METADATA = "latest_checkpointed_iteration.txt", "metadata.json", ".metadata"
COMMON = "common.pt"
LIMIT = 1 << 30  # most bytes of .metadata that are read
DISTCP = re.compile(r"__\d+_\d+\.distcp")
ITERATION = re.compile(r"iter_\d{7,}")
DTYPES = {
    "float64": ("DoubleStorage", torch.float64),
    "float32": ("FloatStorage", torch.float32),
    "bfloat16": ("BFloat16Storage", torch.bfloat16),
    "float16": ("HalfStorage", torch.float16),
}
LAYER = "decoder.layers."
TOP = {
    EMBEDDING: "embedding.word_embeddings.weight",
    HEAD: "output_layer.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
}
QKV, FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
INSIDE = {  # each layer's tensors; q, k, v and gate, up share one
    "input_layernorm": f"{QKV}.layer_norm_weight",
    "self_attn.q_proj": f"{QKV}.weight",
    "self_attn.k_proj": f"{QKV}.weight",
    "self_attn.v_proj": f"{QKV}.weight",
    "self_attn.o_proj": "self_attention.linear_proj.weight",
    "self_attn.q_norm": "self_attention.q_layernorm.weight",
    "self_attn.k_norm": "self_attention.k_layernorm.weight",
    "post_attention_layernorm": f"{FC1}.layer_norm_weight",
    "mlp.gate_proj": f"{FC1}.weight",
    "mlp.up_proj": f"{FC1}.weight",
    "mlp.down_proj": "mlp.linear_fc2.weight",
}
QKV_ROWS = {"q_proj": slice(None, -2), "k_proj": slice(-2, -1), "v_proj": slice(-1, None)}


@dataclass(frozen=True)
class Part:
    """A rectangle of a tensor, and the bytes of the archive that holds it."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Part]


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def size_of(record: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size. Raises ValueError."""
    if isinstance(record, Record) and record.name == "torch.Size" and len(record.args) == 1:
        (numbers,) = record.args
        if isinstance(numbers, tuple) and len(numbers) <= 8 and all(map(is_count, numbers)):
            return numbers
    raise ValueError("a size is not up to 8 counts")


def dtype_of(record: Any) -> torch.dtype:
    name = record.name.removeprefix("torch.") if isinstance(record, Record) else ""
    if name not in DTYPES:
        raise ValueError(f"its dtype {name} is none of {', '.join(DTYPES)}")
    return DTYPES[name][1]


def read_index(data: bytes) -> dict[str, Stored]:
    """Return the tensors that a .metadata lists, without the optimizer's. Raises ValueError."""
    top = read_inert(data)
    if not isinstance(top, Record) or not top.name.endswith(".metadata.Metadata"):
        raise ValueError("it is not the metadata of torch.distributed.checkpoint")
    fields = top.state.named()
    places: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for key, value in fields["storage_data"]:
        at = key.state.named()
        if at.get("offset") is not None and isinstance(at["fqn"], str):
            places[at["fqn"], size_of(at["offset"])] = value.state.named()
    found = {}
    for name, entry in fields["state_dict_metadata"].named().items():
        if entry.name.endswith("BytesStorageMetadata") or name.startswith("optimizer."):
            continue
        about = entry.state.named()
        shape, parts = size_of(about["size"]), []
        for chunk in about["chunks"]:
            box = chunk.state.named()
            starts, sizes = size_of(box["offsets"]), size_of(box["sizes"])
            place = places.get((name, starts))
            if place is None:
                raise ValueError(f"it does not say where {name} from {starts} on is")
            file, offset, length = (place[k] for k in ("relative_path", "offset", "length"))
            if place.get("transform_descriptors"):
                raise ValueError(f"{name} is compressed or encrypted, which is not read here")
            if not isinstance(file, str) or not DISTCP.fullmatch(file):
                raise ValueError(f"{name} is said to be in {file!r}, no .distcp file beside it")
            if not is_count(offset) or not is_count(length):
                raise ValueError(f"offset and length of {name} in {file} are not counts")
            parts.append(Part(starts, sizes, file, offset, length))
        if not tiles(shape, [(part.starts, part.sizes) for part in parts]):
            raise ValueError(f"the parts of {name} do not tile its shape {list(shape)}")
        found[name] = Stored(dtype_of(about["properties"].state[0]), shape, parts)
    return found


def read_archive(data: bytes, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    """Return the one tensor of an archive of torch.save. Raises ValueError."""
    storage, _ = next(pair for pair in DTYPES.values() if pair[1] == dtype)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        if any(info.file_size != info.compress_size for info in archive.infolist()):
            raise ValueError("its archive is compressed, as torch.save never does")
        if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
            raise ValueError("its bytes are not in little-endian order")
        tensor = read_inert(archive.read(names["data.pkl"]))
        if not tensor.name.startswith("torch._utils._rebuild_tensor_v"):
            raise ValueError(f"it holds {tensor.name}, not a plain tensor")
        place, first, shape, strides = tensor.args[:4]
        _, kind, key, _, count = place.args
        if kind.name.rpartition(".")[2] != storage or shape != sizes:
            raise ValueError(f"it holds {kind.name} {shape}, not {dtype} {sizes}")
        values = torch.frombuffer(bytearray(archive.read(names[f"data/{key}"])), dtype=dtype)
    if len(values) != count or not all(map(is_count, (first, *strides))):
        raise ValueError(f"its storage has {len(values)} numbers where {count} are announced")
    return values.as_strided(shape, strides, first)


def read_progress(data: bytes) -> tuple[int, int, int]:
    """Return (iteration, samples consumed, sequence length) of a common.pt. Raises ValueError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (name,) = (n for n in archive.namelist() if n.partition("/")[2] == "data.pkl")
            top = read_inert(archive.read(name), ANY).named()
        args = top["args"].state.named()
        found = (top["iteration"], args["consumed_train_samples"], args["seq_length"])
    except (zipfile.BadZipFile, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"it does not say how far the run is ({error})") from None
    if not all(map(is_count, found)):
        raise ValueError(f"iteration, samples and sequence length {found} are not counts")
    return found


class McoreCheckpoint:
    """The weights of an iteration's directory. Raises CheckpointError naming the file."""

    def __init__(self, place: Path) -> None:
        self.directory = newest(place)
        there = self._files()
        if FORMAT not in there:
            raise self._without_format(there)
        try:
            found = read_json(self.directory / FORMAT)
        except CheckpointError as error:
            raise self._cut_off(f"{error} ({there[FORMAT]} bytes)") from None
        if found.get("sharded_backend") != "torch_dist":
            raise CheckpointError(
                f"{self.directory}: {FORMAT} says {found.get('sharded_backend')!r}; only the "
                "format torch_dist is read here"
            )
        if not there.get(METADATA):
            state = "has 0 bytes" if METADATA in there else "is missing"
            raise self._cut_off(f"{METADATA}, the index of its tensors, {state}")
        with open_plain(self.directory / METADATA) as file:
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise CheckpointError(f"{self.directory}: {METADATA} is larger than {LIMIT} bytes")
        try:
            self.index = read_index(data)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.directory}: {METADATA} ({len(data)} bytes): {error}"
            ) from None
        self._check_sizes(there)

    def progress(self) -> tuple[int, int, int]:
        """Return (iteration, samples consumed, sequence length). Raises CheckpointError."""
        try:
            with open_plain(self.directory / COMMON) as file:
                data = file.read(LIMIT + 1)
            if len(data) > LIMIT:
                raise ValueError(f"it is larger than {LIMIT} bytes")
            return read_progress(data)
        except (ValueError, OSError, NotImplementedError) as error:
            raise CheckpointError(f"{self.directory / COMMON}: {error}") from None

    def _files(self) -> dict[str, int]:
        """Return the bytes of each entry of the directory."""
        try:
            with os.scandir(self.directory) as entries:
                return {e.name: e.stat(follow_symlinks=False).st_size for e in entries}
        except OSError as error:
            raise CheckpointError(f"{self.directory}: {error.strerror}") from None

    def _cut_off(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.directory}: {what}: the save was cut off, or not all of it was copied; take "
            "an earlier iteration"
        )

    def _without_format(self, there: dict[str, int]) -> CheckpointError:
        """Return what a directory without metadata.json is."""
        parts = [size for name, size in there.items() if DISTCP.fullmatch(name)]
        saves = sorted(name for name in there if ITERATION.fullmatch(name))
        if parts or METADATA in there:
            index = (
                "there" if there.get(METADATA) else "missing" if METADATA not in there else "empty"
            )
            return self._cut_off(
                f"{FORMAT}, which Megatron writes last, is missing ({len(parts)} .distcp files "
                f"of {sum(parts):,} bytes are there, {METADATA} is {index})"
            )
        if any(name.startswith("mp_rank_") for name in there):
            return CheckpointError(
                f"{self.directory}: mp_rank_* directories are pickles, which can run code; only "
                "Megatron's torch_dist format is read here"
            )
        if saves:
            return CheckpointError(
                f"{self.directory}: {LATEST} is missing, which Megatron writes after a save; to "
                f"take one of {len(saves)} iterations all the same, give its directory, such as "
                f"{saves[-1]}"
            )
        return CheckpointError(
            f"{self.directory}: there is no {FORMAT}, no {METADATA} and no .distcp file: it is no "
            "checkpoint of Megatron"
        )

    def _check_sizes(self, there: dict[str, int]) -> None:
        """Raise CheckpointError unless each file that holds weights has the bytes listed for it."""
        needed: dict[str, int] = {}
        for part in (part for stored in self.index.values() for part in stored.parts):
            needed[part.file] = max(needed.get(part.file, 0), part.offset + part.length)
        bad = {name: size for name, size in needed.items() if there.get(name, 0) < size}
        if not bad:
            return
        said = [
            f"{name} has {there[name]:,} bytes of at least {size:,}"
            if name in there
            else f"{name}, of at least {size:,} bytes, is missing"
            for name, size in sorted(bad.items())
        ]
        more = f", and {len(said) - 3} more" * (len(said) > 3)
        raise self._cut_off(
            f"{len(bad)} of {len(needed)} files with weights are not complete: "
            f"{'; '.join(said[:3])}{more}"
        )

    def read(self, name: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a rectangle of a tensor. Raises CheckpointError."""
        stored = self.index[name]
        target = torch.empty(sizes, dtype=stored.dtype)
        for part in stored.parts:
            shared = intersection(part.starts, part.sizes, starts, sizes)
            if shared is None:
                continue
            try:
                with open_plain(self.directory / part.file) as file:
                    file.seek(part.offset)
                    data = file.read(part.length)
                values = read_archive(data, stored.dtype, part.sizes)
            except Exception as error:  # zipfile and torch raise many kinds
                where = f"{self.directory / part.file}: {name} at byte {part.offset}"
                raise CheckpointError(f"{where}: {error}") from None
            target[within(starts, shared)] = values[within(part.starts, shared)]
        return target


def within(corner: tuple[int, ...], box: tuple[tuple[int, ...], ...]) -> tuple[slice, ...]:
    """Return where a rectangle (starts, sizes) lies in one that begins at `corner`."""
    return tuple(slice(a - c, a - c + n) for c, a, n in zip(corner, *box, strict=True))


def newest(place: Path) -> Path:
    """Return an iteration's directory: `place`, or the one that the file beside names."""
    if not (place / LATEST).exists():
        return place
    with open_plain(place / LATEST) as file:
        text = file.read(64).strip()
    if not text.isdigit() and text != b"release":
        raise CheckpointError(f"{place / LATEST} says {text!r}, which is no iteration")
    found = place / ("release" if text == b"release" else f"iter_{int(text):07d}")
    if not found.exists():
        there = sorted(entry.name for entry in place.iterdir() if ITERATION.fullmatch(entry.name))
        said = f"there are {', '.join(there[-3:])}" if there else "there is no other"
        raise CheckpointError(f"{place / LATEST} names {found.name}, which is not there; {said}")
    return found


class Source:
    """Canonical tensors made of Megatron's. Raises CheckpointError where they are another model's.

    inside: the shape of each tensor of one layer, in Megatron's names.
    """

    def __init__(self, found: McoreCheckpoint, file: ModelFile, config: LlamaConfig) -> None:
        self.found, self.config = found, config
        c, h, d = config, config.hidden_size, config.head_size
        self.inside = {
            f"{QKV}.layer_norm_weight": (h,),
            f"{QKV}.weight": ((c.num_attention_heads + 2 * c.num_query_groups) * d, h),
            "self_attention.linear_proj.weight": (h, c.num_attention_heads * d),
            f"{FC1}.layer_norm_weight": (h,),
            f"{FC1}.weight": (2 * c.ffn_hidden_size, h),
            "mlp.linear_fc2.weight": (h, c.ffn_hidden_size),
        }
        self.shapes = expected_tensors(file, config)
        if any(name.endswith("q_norm.weight") for name in self.shapes):
            self.inside |= {INSIDE[f"self_attn.{n}_norm"]: (d,) for n in "qk"}
        wanted: dict[str, tuple[int, ...]] = {}
        for name in TOP.keys() & self.shapes.keys():
            wanted[TOP[name]] = self.shapes[name]
        for inside, shape in self.inside.items():
            if LAYER + inside in found.index:
                wanted[LAYER + inside] = (c.num_layers, *shape)
            else:
                wanted |= {f"{LAYER}{i}.{inside}": shape for i in range(c.num_layers)}
        for name, shape in wanted.items():
            if name not in found.index:
                raise CheckpointError(f"{found.directory}: the tensor {name} is missing")
            there = found.index[name].shape
            rows = name in (TOP[EMBEDDING], TOP[HEAD])  # padded
            if there[rows:] != shape[rows:] or there[0] < shape[0]:
                raise CheckpointError(
                    f"{found.directory}: {name} has shape {list(there)}; {CONFIG} asks for "
                    f"{'at least ' if rows else ''}{list(shape)}"
                )
        for name in found.index.keys() - wanted.keys():
            raise CheckpointError(
                f"{found.directory}: {name} is no tensor of the dense Llama in {CONFIG}"
            )

    def place(self, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return the tensor that holds a canonical one, and the rectangle of it: starts, sizes."""
        if name in TOP:
            return TOP[name], (0,) * len(self.shapes[name]), self.shapes[name]
        layer, inside = name.removeprefix("model.layers.").split(".", 1)
        inside = INSIDE[inside.removesuffix(".weight")]
        one = self.inside[inside]
        if LAYER + inside in self.found.index:  # stacked
            return LAYER + inside, (int(layer), *(0 for _ in one)), (1, *one)
        return f"{LAYER}{layer}.{inside}", (0,) * len(one), one

    def tensor(self, name: str) -> Tensor:
        """Return a canonical tensor, whole."""
        shape = self.shapes[name]
        theirs, starts, sizes = self.place(name)
        values = self.found.read(theirs, starts, sizes)
        kind = name.split(".")[-2]
        if kind in QKV_ROWS:  # [g (a/g + 2) d, h] -> [g, a/g + 2, d, h]
            groups, d = self.config.num_query_groups, self.config.head_size
            values = values.view(groups, -1, d, shape[1])[:, QKV_ROWS[kind]]
        elif kind in ("gate_proj", "up_proj"):
            values = values.view(2, *shape)[int(kind == "up_proj")]
        return values.reshape(shape).contiguous()

    def pieces(self) -> list[NamedPiece]:
        """List the whole tensors, each read when it is written."""
        found = []
        for name, shape in self.shapes.items():
            dtype = self.found.index[self.place(name)[0]].dtype
            empty = torch.empty(shape, dtype=dtype, device="meta")
            found.append(whole(name, empty, partial(self.tensor, name)))
        return found


def import_mcore(source: Path, hf: Path, root: Path, note: Callable[[str], None]) -> Path:
    """Write a Megatron checkpoint's weights as one of ours; return its directory.

    It is of Megatron's iteration, with the samples that were consumed, so that --no-load-optim goes
    on in the data. Where common.pt does not say these, it is of step 0 and a line (`note`) says so.

    hf: a directory with the model's config.json and, if there are any, its tokenizer's files.
    """
    foreign = read_json(hf / CONFIG)
    file = model_file_of(foreign)
    config = read_sizes(file, foreign)
    made = Source(McoreCheckpoint(source), file, config)
    check_empty(root)
    dtype = str(made.found.index[TOP[EMBEDDING]].dtype).removeprefix("torch.")
    ids = {k: foreign[k] for k in TOKEN_IDS if foreign.get(k) is not None}
    files = tokenizer_files(hf)
    try:
        iteration, consumed, length = made.found.progress()
    except CheckpointError as error:
        iteration = consumed = length = 0
        note(f"{error}: the checkpoint begins at sample 0")
    state = {
        "iteration": iteration,
        "consumed_samples": consumed,
        "consumed_tokens": consumed * length,
        "optimizer_steps": iteration,
        "hf_config": {**file.hf_config(config, dtype), **ids},
        **tokenizer_of(files),
    }
    pieces = made.pieces()
    return save_checkpoint(
        root, step=iteration, pieces=pieces, state=state, grid=Grid(), attach=files
    )
