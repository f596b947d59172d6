# SPDX-License-Identifier: Apache-2.0
"""Compare two checkpoints, whatever layouts wrote them, reading a block of some MB at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from training.checkpoint import Checkpoint, NamedPiece
from training.checkpoint.header import BY_NAME
from training.checkpoint.stream import Room
from training.run.waiting import Progress

BLOCK = 1 << 20  # elements of each side in memory
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # same bits, by bytes an element
OF_A_SAVE = ("layout", "torch_version")  # keys about the writer, not the contents: not compared


@dataclass(frozen=True)
class Difference:
    """How two tensors of one shape differ: in how many elements, by how much, and where first.

    largest: the largest absolute difference. first: the row-major first index that differs; here
    and there are the values at it.
    """

    elements: int
    largest: float
    first: tuple[int, ...]
    here: float
    there: float


def flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings."""
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from flatten(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def compare_states(a: Checkpoint, b: Checkpoint) -> list[tuple[str, Any, Any]]:
    """List (key, value in a, value in b) where the states differ; None for a missing key."""
    left, right = dict(flatten(a.state)), dict(flatten(b.state))
    return [
        (key, left.get(key), right.get(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and key.partition(".")[0] not in OF_A_SAVE
    ]


def compare_tensors(
    a: Checkpoint, b: Checkpoint, name: str, rooms: Sequence[Room]
) -> Difference | None:
    """Compare a tensor that both have with the same shape; return None if it is equal.

    Equal means bit for bit, or equal in value between two dtypes.
    """
    shape = a.index[name]["shape"]
    dtypes = [BY_NAME[side.index[name]["dtype"]] for side in (a, b)]
    count, largest, found = 0, 0.0, None
    for starts, sizes in blocks(shape):
        x, y = (
            read(side, name, starts, room.tensor(sizes, dtype))
            for side, dtype, room in zip((a, b), dtypes, rooms[:2], strict=True)
        )
        differ = rooms[2].tensor(sizes, torch.bool)
        if dtypes[0] == dtypes[1]:
            bits = BITS[x.element_size()]
            torch.ne(x.view(bits), y.view(bits), out=differ)
        else:
            torch.ne(x.double(), y.double(), out=differ)
        if not differ.any():
            continue
        where = differ.nonzero()
        left, right = x[differ].double(), y[differ].double()
        distance = (left - right).abs().max().item()
        if distance > largest or distance != distance:  # a NaN is the largest and stays so
            largest = distance
        count += len(where)
        if found is None:
            at = tuple(s + i for s, i in zip(starts, where[0].tolist(), strict=True))
            found = at, left[0].item(), right[0].item()
    return Difference(count, largest, *found) if found else None


def blocks(shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield blocks (starts, sizes) of whole rows of a shape: at most BLOCK elements, or one row."""
    rest = (0,) * (len(shape) - 1)
    rows = max(1, BLOCK // max(1, prod(shape[1:])))
    if not shape:
        yield (), ()
    for row in range(0, shape[0] if shape else 0, rows):
        yield (row, *rest), (min(rows, shape[0] - row), *shape[1:])


def read(side: Checkpoint, name: str, starts: tuple[int, ...], target: Tensor) -> Tensor:
    """Fill `target` with the rectangle of a tensor that begins at `starts`."""
    shape = tuple(side.index[name]["shape"])
    side.read([NamedPiece(name, shape, starts, tuple(target.shape), target)], finite=False)
    return target


def diff(a: Checkpoint, b: Checkpoint, tensors_only: bool, progress: Progress) -> Iterator[str]:
    """Yield a line for each difference, and a summary at the end if there are any.

    progress: counts the tensors.
    """
    settings = alone = shapes = dtypes = elements = 0
    worst: tuple[float, str] = (0.0, "")
    changed: list[str] = []
    if not tensors_only:
        for key, left, right in compare_states(a, b):
            settings += 1
            yield f"state   {key}: {left!r} | {right!r}"
    for side, other, sign in ((a, b, "A"), (b, a, "B")):
        other.known_as(side.index)
        for name in side.index:
            if name not in other.index:
                alone += 1
                yield f"tensor  {name}: only in {sign}"
    rooms = (Room(), Room(), Room())
    progress.begin("", len(a.index), "tensors")
    for name, entry in a.index.items():
        progress.add()
        if name not in b.index:
            continue
        other = b.index[name]
        if entry["shape"] != other["shape"]:
            shapes += 1
            yield f"tensor  {name}: shape {entry['shape']} | {other['shape']}"
            continue
        found = compare_tensors(a, b, name, rooms)
        kinds = f"{entry['dtype']} | {other['dtype']}, "
        if found is not None:
            changed.append(name)
            elements += found.elements
            worst = max(worst, (found.largest, name), key=lambda pair: (pair[0] != pair[0], pair))
            yield (
                f"tensor  {name}: {kinds if entry['dtype'] != other['dtype'] else ''}"
                f"{found.elements} of {prod(entry['shape'])} elements differ, by at most "
                f"{found.largest:.3g}; the first at {list(found.first)}: "
                f"{found.here!r} | {found.there!r}"
            )
        elif entry["dtype"] != other["dtype"]:
            dtypes += 1
            yield f"tensor  {name}: {kinds}equal in value"
    both = len(a.index.keys() & b.index.keys())
    counts = {
        "settings of the state differ": settings,
        "tensors are in one of them only": alone,
        "tensors have another shape": shapes,
        "tensors have another dtype and equal values": dtypes,
        f"of {both} tensors differ in value": len(changed),
    }
    counts_text = [f"{count} {what}" for what, count in counts.items() if count]
    if changed:
        counts_text[-1] += f" ({elements:,} elements, by at most {worst[0]:.3g} in {worst[1]})"
    if counts_text:
        yield f"in all  {'; '.join(counts_text)}"
