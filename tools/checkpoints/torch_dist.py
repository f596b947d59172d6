# SPDX-License-Identifier: Apache-2.0
"""Read megatron-core's directory of torch.distributed.checkpoint, as data.

    iter_0000500/metadata.json     names the format, torch_dist
    iter_0000500/.metadata         a pickle: each tensor's shape, and the places of its parts
    iter_0000500/__R_W.distcp      those parts, one after another, each an archive of torch.save
    iter_0000500/common.pt         a pickle: the run's arguments, its progress, hyperparameters

All are read as data (inert_pickle.py). An object is an archive whose pickle describes more than one
tensor: ranks of megatron-core store such objects besides the tensors that they share.
"""

import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.checkpoints.inert_pickle import ANY, KNOWN, Record, read_inert, shown
from training.checkpoint import CheckpointError
from training.checkpoint.files import open_plain
from training.checkpoint.huggingface import read_json
from training.checkpoint.manifest import intersection, tiles

LATEST, FORMAT, METADATA = "latest_checkpointed_iteration.txt", "metadata.json", ".metadata"
COMMON = "common.pt"
LIMIT = 1 << 30  # most bytes of .metadata that are read
PICKLE = 1 << 26  # most bytes of the pickle in an archive
STEP = 1 << 12  # most bytes of a tensor that is one number
BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, LookupError, RuntimeError, EOFError)
DISTCP = re.compile(r"__[0-9]+_[0-9]+\.distcp")
ITERATION = re.compile(r"iter_[0-9]{7,}")
REBUILD = "torch._utils._rebuild_tensor_v"
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
DTYPES = {
    "float64": ("DoubleStorage", torch.float64),
    "float32": ("FloatStorage", torch.float32),
    "bfloat16": ("BFloat16Storage", torch.bfloat16),
    "float16": ("HalfStorage", torch.float16),
}


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


Index = dict[str, Stored]
Place = tuple[str, int, int]  # file, offset, length


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 0 that fits into 64 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def size_of(record: Any) -> tuple[int, ...]:
    """Return the dimensions of a torch.Size. Raises ValueError."""
    if isinstance(record, Record) and record.name == "torch.Size" and len(record.args) == 1:
        (numbers,) = record.args
        if isinstance(numbers, tuple) and len(numbers) <= 8 and all(map(is_count, numbers)):
            return numbers
    raise ValueError("a size must be at most 8 whole numbers >= 0")


def dtype_of(tensor: str, record: Any) -> torch.dtype:
    name = record.name.removeprefix("torch.") if isinstance(record, Record) else ""
    if name not in DTYPES:
        raise ValueError(f"{tensor}: its dtype {name[:80]} is none of {', '.join(DTYPES)}")
    return DTYPES[name][1]


def read_index(data: bytes, accepts: Callable[[str], bool]) -> tuple[Index, dict[str, Part]]:
    """Return the tensors that a .metadata lists, and the places of its objects.

    accepts: returns whether a name is wanted. Raises ValueError.
    """
    top = read_inert(data)
    if not isinstance(top, Record) or not top.name.endswith(".metadata.Metadata"):
        raise ValueError("it is not the metadata of torch.distributed.checkpoint")
    fields = top.state.named()
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for key, value in fields["storage_data"]:
        at = key.state.named()
        if isinstance(at["fqn"], str) and accepts(at["fqn"]):
            starts = size_of(at["offset"]) if at.get("offset") is not None else None
            places[at["fqn"], starts] = _place(at["fqn"], value.state.named())
    tensors, objects = dict[str, Stored](), dict[str, Part]()
    for name, entry in fields["state_dict_metadata"].named().items():
        if not accepts(name):
            continue
        if entry.name.endswith("BytesStorageMetadata"):
            if (name, None) in places:
                objects[name] = Part((), (), *places[name, None])
            continue
        about = entry.state.named()
        shape, parts = size_of(about["size"]), []
        for chunk in about["chunks"]:
            box = chunk.state.named()
            starts, sizes = size_of(box["offsets"]), size_of(box["sizes"])
            place = places.get((name, starts))
            if place is None:
                raise ValueError(f"it does not give the place of the part of {name} at {starts}")
            parts.append(Part(starts, sizes, *place))
        if not tiles(shape, [(part.starts, part.sizes) for part in parts]):
            raise ValueError(f"the parts of {name} do not tile its shape {list(shape)}")
        tensors[name] = Stored(dtype_of(name, about["properties"].state[0]), shape, parts)
    return tensors, objects


def _place(name: str, place: dict[str, Any]) -> Place:
    """Return (file, offset, length). Raises ValueError."""
    file, offset, length = (place[k] for k in ("relative_path", "offset", "length"))
    if place.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed or encrypted, which is not read here")
    if not isinstance(file, str) or not DISTCP.fullmatch(file):
        raise ValueError(
            f"{name} is listed in {shown(file)}, which is not a .distcp file next to it"
        )
    if not is_count(offset) or not is_count(length):
        raise ValueError(f"offset and length of {name} in {file} are not counts")
    return file, offset, length


@contextmanager
def _sound() -> Iterator[None]:
    """Raise ValueError for errors of zipfile, where an archive is damaged or malicious."""
    try:
        yield
    except BROKEN as error:
        raise ValueError(f"it is not a sound archive of torch.save ({error})") from None


class Archive:
    """An archive of torch.save that is read as data: its pickle, a number, a tensor.

    start, length: its bytes in the file; length None: up to the end. known: the classes that it may
    name. Raises ValueError, as its methods do.
    """

    def __init__(
        self,
        path: Path,
        start: int = 0,
        length: int | None = None,
        known: re.Pattern[str] = ANY,
    ) -> None:
        self._file = Window(path, start, length)
        with _sound():
            self._zip = zipfile.ZipFile(self._file)
            self._members = {info.filename.partition("/")[2]: info for info in self._zip.filelist}
            if "byteorder" in self._members and self._member("byteorder", 16) != b"little":
                raise ValueError("its bytes are not in little-endian order")
            self.top = read_inert(self._member("data.pkl", PICKLE), known)

    def _info(self, name: str) -> zipfile.ZipInfo:
        """Return a member that is neither compressed nor encrypted, as torch.save writes all."""
        info = self._members[name]
        if info.flag_bits & 1:
            raise ValueError(f"its {name} is encrypted, as torch.save never does")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"its {name} is compressed, as torch.save never does")
        return info

    def _member(self, name: str, most: int) -> bytes:
        """Return the bytes of a member, whose checksum is verified."""
        info = self._info(name)
        if info.file_size > most:
            raise ValueError(f"its {name} has {info.file_size:,} bytes, more than {most:,}")
        with _sound():
            return self._zip.read(info)

    def close(self) -> None:
        self._file.close()

    def number(self, value: Any) -> float:
        """Return a number, which may be a tensor of one. Raises ValueError."""
        if type(value) in (int, float):
            return float(value)
        first, shape, _, dtype, key = self._storage(value)
        with _sound():
            data = self._member(key, STEP)
        if prod(shape) != 1 or len(data) < (first + 1) * dtype.itemsize:
            raise ValueError(f"a tensor of {list(shape)} is where a number is expected")
        return float(torch.frombuffer(bytearray(data), dtype=dtype)[first])

    def _storage(
        self, record: Any
    ) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, str]:
        """Return (first, shape, strides, dtype, key of its bytes) of a tensor."""
        plain = isinstance(record, Record) and record.name.startswith(REBUILD)
        if not plain or not isinstance(record.args, tuple) or len(record.args) < 4:
            raise ValueError("it does not hold a tensor, which is expected")
        place, first, shape, strides = record.args[:4]
        where = place.args if isinstance(place, Record) else ()
        if not isinstance(where, tuple) or len(where) != 5 or not isinstance(where[2], str):
            raise ValueError("it does not give the place of its values")
        kind, sizes = where[1], (shape, strides)
        dtype = kind.name.rpartition(".")[2] if isinstance(kind, Record) else ""
        dtypes = {storage: found for storage, found in DTYPES.values()}
        if dtype not in dtypes:
            raise ValueError(f"a tensor of {shown(kind)} is not read here")
        if not all(isinstance(s, tuple) and len(s) <= 8 and all(map(is_count, s)) for s in sizes):
            raise ValueError(f"{shown(shape)} and {shown(strides)} are no shape and strides")
        if len(shape) != len(strides) or not is_count(first):
            raise ValueError(f"{shown(first)} and {shown(strides)} are no place in its storage")
        return first, shape, strides, dtypes[dtype], f"data/{where[2]}"

    def whole(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
        """Return the only tensor of the archive, which must have this dtype and these sizes."""
        first, shape, strides, found, key = self._storage(self.top)
        if found != dtype or shape != sizes:
            raise ValueError(f"it holds {found} {list(shape)}, not {dtype} {list(sizes)}")
        data = self._member(key, 2 * prod(sizes) * dtype.itemsize + 4096)
        count = self.top.args[0].args[4]
        if type(count) is not int or len(data) != count * dtype.itemsize:
            raise ValueError(f"its storage has {len(data)} bytes for {shown(count)} numbers")
        last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if prod(shape) and last >= count:
            raise ValueError(f"its last number is number {last} of {count}")
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).as_strided(shape, strides, first)


class Window(io.RawIOBase):
    """Bytes [start, start + length) of a plain file, as a file."""

    def __init__(self, path: Path, start: int, length: int | None) -> None:
        self._file = open_plain(path)
        size = self._file.seek(0, os.SEEK_END)
        self._start, self._at = start, 0
        self._length = size - start if length is None else min(length, size - start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        found = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(found)
        return found

    def close(self) -> None:
        self._file.close()
        super().close()


class McoreCheckpoint:
    """An iteration's directory. Raises CheckpointError naming the file.

    index: its tensors. objects: the places of its objects. with_optimizer: the optimizer's too.
    """

    def __init__(self, place: Path, with_optimizer: bool = False) -> None:
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
                f"{self.directory}: {FORMAT} says {str(found.get('sharded_backend'))[:80]!r}; only "
                "the format torch_dist is read here"
            )
        if not there.get(METADATA):
            state = "has 0 bytes" if METADATA in there else "is missing"
            raise self._cut_off(f"{METADATA}, the index of its tensors, {state}")
        with open_plain(self.directory / METADATA) as file:
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise CheckpointError(f"{self.directory}: {METADATA} is larger than {LIMIT} bytes")
        try:
            self.index, self.objects = read_index(
                data, lambda name: with_optimizer or not OPTIMIZER.match(name)
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.directory}: {METADATA} ({len(data)} bytes): {error}"
            ) from None
        self._check_sizes(there)

    @cached_property
    def common(self) -> Archive:
        """Open common.pt, the data that all ranks share. Raises CheckpointError."""
        return self._open(self.directory / COMMON, 0, None)

    def has_common(self) -> bool:
        """Return whether common.pt exists and can be read."""
        try:
            self.common  # noqa: B018
        except CheckpointError:
            return False
        return True

    def object(self, name: str) -> Archive:
        """Open an object; its `top` is a list of one. Raises CheckpointError."""
        part = self.objects[name]
        return self._open(self.directory / part.file, part.offset, part.length)

    def _open(self, path: Path, start: int, length: int | None) -> Archive:
        try:
            return Archive(path, start, length)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None

    def arguments(self) -> dict[str, Any]:
        """Return the run's arguments in common.pt, as data. Raises CheckpointError."""
        try:
            found: dict[str, Any] = self.common.top.named()["args"].state.named()
        except (LookupError, AttributeError):
            raise CheckpointError(
                f"{self.directory / COMMON}: it lacks args, so the run's progress is not known"
            ) from None
        return found

    def progress(self) -> tuple[int, int, int]:
        """Return (iteration, samples consumed, sequence length). Raises CheckpointError."""
        try:
            args, iteration = self.arguments(), self.common.top.named()["iteration"]
            found = (iteration, args["consumed_train_samples"], args["seq_length"])
        except (LookupError, AttributeError) as error:
            raise CheckpointError(
                f"{self.directory / COMMON}: the run's progress is missing ({error})"
            ) from None
        counts = all(map(is_count, found))
        if not counts or not is_count(found[1] * found[2]):
            raise CheckpointError(
                f"{self.directory / COMMON}: iteration, samples and sequence length "
                f"{', '.join(map(shown, found))} are not counts, or have too many tokens"
            )
        return found

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
        """Return the error for a directory without metadata.json."""
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
                f"take one of {len(saves)} iterations anyway, give its directory, such as "
                f"{saves[-1]}"
            )
        return CheckpointError(
            f"{self.directory}: there is no {FORMAT}, no {METADATA} and no .distcp file: it is not "
            "a checkpoint of Megatron"
        )

    def _check_sizes(self, there: dict[str, int]) -> None:
        """Raise CheckpointError unless each file that is needed has the bytes listed for it."""
        needed: dict[str, int] = {}
        tensors = (part for stored in self.index.values() for part in stored.parts)
        states = (part for name, part in self.objects.items() if OPTIMIZER.match(name))
        for part in (*tensors, *states):
            needed[part.file] = max(needed.get(part.file, 0), part.offset + part.length)
        bad = {name: size for name, size in needed.items() if there.get(name, 0) < size}
        if not bad:
            return
        problems = [
            f"{name} has {there[name]:,} bytes and needs at least {size:,}"
            if name in there
            else f"{name}, of at least {size:,} bytes, is missing"
            for name, size in sorted(bad.items())
        ]
        more = f", and {len(problems) - 3} more" * (len(problems) > 3)
        raise self._cut_off(
            f"{len(bad)} of {len(needed)} required files are incomplete: "
            f"{'; '.join(problems[:3])}{more}"
        )

    def read(self, name: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a rectangle of a tensor. Raises CheckpointError."""
        stored, target = self.index[name], None
        for part in stored.parts:
            shared = intersection(part.starts, part.sizes, starts, sizes)
            if shared is None:
                continue
            try:
                found = Archive(self.directory / part.file, part.offset, part.length, KNOWN)
                try:
                    values = found.whole(stored.dtype, part.sizes)
                finally:
                    found.close()
            except (ValueError, OSError) as error:
                where = f"{self.directory / part.file}: {name} at byte {part.offset}"
                raise CheckpointError(f"{where}: {error}") from None
            if target is None:
                self._check_lengths(name)
                target = torch.empty(sizes, dtype=stored.dtype)
            target[within(starts, shared)] = values[within(part.starts, shared)]
        return torch.empty(sizes, dtype=stored.dtype) if target is None else target

    def _check_lengths(self, name: str) -> None:
        """Raise CheckpointError if a part of a tensor has too few bytes for its sizes."""
        stored = self.index[name]
        for part in stored.parts:
            need = prod(part.sizes) * stored.dtype.itemsize
            if part.length < need:
                raise CheckpointError(
                    f"{self.directory / part.file}: {name} at byte {part.offset} has {part.length} "
                    f"bytes and needs at least {need}"
                )


def within(corner: tuple[int, ...], box: tuple[tuple[int, ...], ...]) -> tuple[slice, ...]:
    """Return the slices of a rectangle (starts, sizes) in one that begins at `corner`."""
    return tuple(slice(a - c, a - c + n) for c, a, n in zip(corner, *box, strict=True))


def newest(place: Path) -> Path:
    """Return an iteration's directory: `place`, or the one that the file LATEST in it names."""
    if not (place / LATEST).exists():
        return place
    with open_plain(place / LATEST) as file:
        text = file.read(64).strip()
    if not text.isdigit() and text != b"release":
        raise CheckpointError(f"{place / LATEST} says {text!r}, which is not an iteration")
    found = place / ("release" if text == b"release" else f"iter_{int(text):07d}")
    if not found.exists():
        there = sorted(entry.name for entry in place.iterdir() if ITERATION.fullmatch(entry.name))
        others = f"there are {', '.join(there[-3:])}" if there else "there is no other"
        raise CheckpointError(f"{place / LATEST} names {found.name}, which is not there; {others}")
    return found
