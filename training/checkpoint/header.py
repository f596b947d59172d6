# SPDX-License-Identifier: Apache-2.0
"""Read the header of a safetensors file of any origin, without trusting it."""

import os
from collections.abc import Iterable
from math import prod
from pathlib import Path

from training.checkpoint.errors import CheckpointError
from training.checkpoint.files import open_plain
from training.checkpoint.manifest import parse
from training.checkpoint.pieces import DTYPES, HEADER_LIMIT, NAMES

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def read_header(path: Path, links: bool = False) -> tuple[int, dict[str, tuple[str, list[int]]]]:
    """Return a safetensors file's size and {tensor: (dtype, shape)}.

    links: see open_plain(). Raises CheckpointError naming the broken rule: the header lies in the
    file and is a JSON object; each tensor has the size of its dtype and shape; the tensors fill the
    file one after another, so that nothing overlaps and nothing is hidden in between.
    """

    def refuse(rule: str) -> CheckpointError:
        return CheckpointError(f"{path.name} is not a valid safetensors file: {rule}")

    with open_plain(path, links) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise refuse(f"it has {size} bytes, fewer than the 8 of its header's length")
        start = file.read(8)
        if start == b"version ":
            raise refuse("it is a Git LFS pointer: fetch the file with `git lfs pull`")
        length = int.from_bytes(start, "little")
        if length > HEADER_LIMIT:
            raise refuse(f"its header has {length:,} bytes, more than {HEADER_LIMIT:,}")
        if length > size - 8:
            raise refuse(f"its header of {length} bytes ends beyond the {size} of the file")
        header = parse(
            file.read(length), f"{path.name} is not a valid safetensors file: its header"
        )
    texts = header.pop("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise refuse("its __metadata__ is not an object of strings")
    if len(header) > NAMES:
        raise refuse(f"its header names {len(header):,} tensors, more than {NAMES:,}")
    found, spans = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [begin, end, *shape]
        except (TypeError, KeyError, ValueError):
            raise refuse(f"{name} needs dtype, shape and two data_offsets") from None
        if len(shape) > 8 or any(type(n) is not int or n < 0 for n in numbers):
            raise refuse(f"shape and data_offsets of {name} must be up to 8 numbers >= 0")
        if not isinstance(dtype, str) or dtype not in BY_NAME:
            raise CheckpointError(
                f"{path.name}: {name} is {dtype}; only {', '.join(BY_NAME)} are read"
            )
        need = prod(shape) * BY_NAME[dtype].itemsize
        if end - begin != need:
            raise refuse(f"{name}, {dtype} {shape}, needs {need} bytes and has {end - begin}")
        found[name] = (dtype, shape)
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            how = "overlaps another tensor" if begin < at else "leaves a hole before it"
            raise refuse(f"{name} {how}: it begins at {begin}, not {at}")
        at = end
    if at != size - 8 - length:
        raise refuse(f"its tensors end at byte {at}, its data at {size - 8 - length}")
    return size, found


def check_header(path: Path, wanted: Iterable[tuple[str, str, list[int]]]) -> None:
    """Raise CheckpointError unless a file is valid and holds the tensors (key, dtype, shape)."""
    _, found = read_header(path)
    for key, dtype, shape in wanted:
        if key not in found:
            raise CheckpointError(f"{path.name} does not hold {key}")
        if found[key] != (dtype, list(shape)):
            raise CheckpointError(
                f"{path.name}: {key} is {found[key][0]} {found[key][1]}, and the index says "
                f"{dtype} {list(shape)}"
            )
