# SPDX-License-Identifier: Apache-2.0
"""Define the contents of a checkpoint's JSON files, and read them back without trusting them.

The manifest names every other file with its size and checksums (files.py) and has a SHA-256 of
itself, so an edit, a flipped bit or a truncation anywhere is detected. (Checksums next to the data
prove that it is intact, not who wrote it.)
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from training.checkpoint.errors import CheckpointError, MismatchError
from training.checkpoint.files import SUMS, open_plain, read_checked
from training.checkpoint.pieces import DTYPES
from training.files.owned import plain_files
from training.files.untrusted import parse_json

FORMAT = "weft-checkpoint"
# 2: the state names frozen parameters, which have no optimizer state
VERSION, VERSION_WITH_FROZEN = 1, 2
MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
# .old: set aside while its successor is renamed
STEP = re.compile(r"step_(\d{8,})(\.old-[0-9a-f]+)?")
# a file's name: no separator, no leading dot
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
LIMIT = 1 << 28  # most bytes of a JSON file that are read
# most dimensions and elements of one tensor, and most corners of the rectangles of all tensors
DIMENSIONS, ELEMENTS, CORNERS = 8, 1 << 60, 1 << 26


# names of files that a save writes, for a save whose manifest is missing or damaged
SAVED = re.compile(
    r"(rank_\d{5}-\d{3}|index|state|manifest|tokenizer(_config)?|special_tokens_map|added_tokens"
    r"|vocab|chat_template|generation_config)\.(safetensors|json|model)|merges\.txt"
    r"|chat_template\.jinja|[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.(model|tiktoken)"
)


def step_name(step: int) -> str:
    """Return the name of a step's directory."""
    return f"step_{step:08d}"


def plain_name(path: Path, otherwise: str) -> str:
    """Return a file's name for use in a checkpoint: its own if plain and free, or `otherwise`."""
    taken = path.name in (MANIFEST, INDEX, STATE) or path.suffix == ".safetensors"
    if PLAIN.fullmatch(path.name) and not taken:
        return path.name
    return otherwise + (path.suffix if PLAIN.fullmatch("a" + path.suffix) and not taken else "")


def self_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own digest."""
    rest = {k: v for k, v in manifest.items() if k != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def parse(data: bytes, name: str, foreign: bool = False) -> dict[str, Any]:
    """Parse a JSON object, within the limits of files/untrusted.py, or raise CheckpointError.

    foreign: as in parse_json.
    """
    try:
        value = parse_json(data, name, foreign)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} does not hold a JSON object")
    return value


def read_manifest(directory: Path, at: Path) -> dict[str, Any]:
    """Read and check manifest.json. Raises CheckpointError; MismatchError for a newer format.

    at: the path by which `directory` is read.
    """
    with open_plain(at / MANIFEST) as file:
        data = file.read(LIMIT + 1)
    check_length(MANIFEST, len(data))
    manifest = parse(data, MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST}: format is {manifest.get('format')!r}, not {FORMAT!r}")
    # checked before the version, where a flipped bit would look like a newer format
    if manifest.get("digest") != self_digest(manifest):
        raise CheckpointError(f"{MANIFEST} was changed after it was written (its digest differs)")
    if manifest.get("version") not in (VERSION, VERSION_WITH_FROZEN):
        raise MismatchError(
            f"{directory}: format version {manifest.get('version')!r}; this program reads versions "
            f"{VERSION} and {VERSION_WITH_FROZEN}"
        )
    step = STEP.fullmatch(directory.name)
    if (
        type(manifest.get("step")) is not int
        or manifest["step"] < 0
        or (step and int(step[1]) != manifest["step"])
    ):
        raise CheckpointError(
            f"{MANIFEST} says step {manifest.get('step')!r} in a directory named {directory.name}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not {INDEX, STATE} <= files.keys():
        raise CheckpointError(f"{MANIFEST}: 'files' does not list {INDEX} and {STATE}")
    for name, info in files.items():
        size = info.get("size") if isinstance(info, dict) else None
        sums = [info.get(kind, "") for kind in SUMS] if isinstance(info, dict) else [0]
        sound = type(size) is int and 0 <= size < 1 << 62 and all(type(s) is str for s in sums)
        if not PLAIN.fullmatch(name) or not sound or not sums[0]:
            raise CheckpointError(f"{MANIFEST}: bad entry for the file {name[:200]!r}")
    return manifest


def holds_a_save(directory: Path) -> bool:
    """Return whether a directory is empty or holds only files that a save wrote.

    These are the files that its manifest lists or, if that is missing or damaged, files with the
    names that a save gives, tensors among them, or the one that its state gives the tokenizer's. A
    link, a folder or another file does not belong to a save, nor does a copy of another step.
    """
    found, step = plain_files(directory), STEP.fullmatch(directory.name)
    if found is None:
        return False
    names = found.keys() - {MANIFEST}
    try:
        manifest = read_manifest(Path(), directory)
        copied = step is not None and int(step[1]) != manifest["step"]
        return not copied and names <= manifest["files"].keys()
    except (CheckpointError, OSError):
        own = None
        with suppress(CheckpointError, OSError), open_plain(directory / STATE) as file:
            own = parse(file.read(LIMIT), STATE).get("tokenizer_model")
        known = all(name == own or SAVED.fullmatch(name) for name in names)
        tensors = any(name.startswith("rank_") for name in names)
        return known and (tensors or not found or step is None)


def check_length(name: str, size: int) -> None:
    """Raise CheckpointError for a JSON file of more bytes than are read."""
    if size > LIMIT:
        raise CheckpointError(f"{name} is larger than {LIMIT} bytes")


def read_part(directory: Path, manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """Read index.json or state.json after checking its SHA-256."""
    check_length(name, manifest["files"][name]["size"])
    return parse(read_checked(directory / name, manifest["files"][name]), name)


def check_index(index: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Raise CheckpointError unless each tensor's rectangles tile it and lie in listed files."""
    corners = 0
    for name, entry in index.items():
        try:
            shape, parts = entry["shape"], entry["parts"]
            sound = entry["dtype"] in DTYPES.values() and len(shape) <= DIMENSIONS
            sound = sound and all(type(n) is int and 0 <= n for n in shape)
            sound = sound and prod(shape) <= ELEMENTS
            corners += len(parts) << len(shape) if sound else 0
            if not sound or corners > CORNERS:
                raise ValueError
            for file, key, starts, sizes in parts:
                sound &= file in manifest["files"] and isinstance(key, str)
                for n, start, size in zip(shape, starts, sizes, strict=True):
                    sound &= type(start) is type(size) is int and 0 <= start <= start + size <= n
            sound = sound and tiles(shape, [(starts, sizes) for _, _, starts, sizes in parts])
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise CheckpointError(f"{INDEX}: bad entry for the tensor {name[:200]!r}")


def merge_index(parts: list[list[list[Any]]]) -> dict[str, Any]:
    """Merge each rank's rows [name, dtype, shape, file, key, starts, sizes] into one index.

    Raises CheckpointError unless the rectangles of each tensor tile it exactly.
    """
    index: dict[str, Any] = {}
    for rows in parts:
        for name, dtype, shape, file, key, starts, sizes in rows:
            entry = index.setdefault(name, {"dtype": dtype, "shape": shape, "parts": []})
            if (entry["dtype"], entry["shape"]) != (dtype, shape):
                raise CheckpointError(f"ranks disagree about the dtype or shape of {name}")
            entry["parts"].append([file, key, starts, sizes])
    for name, entry in index.items():
        if not tiles(entry["shape"], [(starts, sizes) for _, _, starts, sizes in entry["parts"]]):
            raise CheckpointError(f"the ranks' pieces do not tile {name} {entry['shape']}")
    return index


def tiles(shape: Sequence[int], rectangles: Iterable[tuple[Any, Any]]) -> bool:
    """Return whether rectangles (starts, sizes) cover `shape`, each element once.

    The corners of a rectangle, with a sign that alternates along each edge, determine it, and those
    of several rectangles add up. So they tile the whole if and only if their corners sum to those
    of the whole. The time is proportional to the number of rectangles.
    """
    total: dict[tuple[int, ...], int] = {}

    def add(starts: Any, sizes: Any, sign: int) -> None:
        if all(sizes):  # else it is empty
            for ends in product((0, 1), repeat=len(sizes)):
                corner = tuple([a + n * e for a, n, e in zip(starts, sizes, ends, strict=True)])
                total[corner] = total.get(corner, 0) + sign * (-1) ** sum(ends)

    for starts, sizes in rectangles:
        if any(a < 0 or a + n > size for a, n, size in zip(starts, sizes, shape, strict=True)):
            return False
        add(starts, sizes, 1)
    add([0] * len(shape), shape, -1)
    return not any(total.values())


def volume(sizes: Any) -> int:
    """Return the number of elements of a rectangle."""
    return prod(sizes)


def intersection(
    starts_a: Any, sizes_a: Any, starts_b: Any, sizes_b: Any
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (starts, sizes) of the intersection of two rectangles, None if it is empty."""
    starts, sizes = [], []
    for a, n, b, m in zip(starts_a, sizes_a, starts_b, sizes_b, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        starts.append(low)
        sizes.append(high - low)
    return tuple(starts), tuple(sizes)
