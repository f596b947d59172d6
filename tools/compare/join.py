# SPDX-License-Identifier: Apache-2.0
"""Read the records of a step of all ranks of one run, and assemble each tensor from its parts.

A parameter's parts are placed by the rectangles in the record (Placement.pieces). Those of an
activation are placed by tokens, [samples, positions, ...], and over tp by the region that the layer
declares: whole on each rank, a part of the sequence, or a part of the features. If a layer declares
none, it is derived from the shape on the other side.

Nothing of the product is imported: a record may be of another commit.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

INSIDE = "tensor-parallel"  # a region
DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)}  # fmt: skip


class Key(NamedTuple):
    """Identifies a quantity of a step, in the same way on both sides."""

    group: str  # batch, parameter, activation, collective
    kind: str
    name: str
    phase: str = ""
    item: int = 0  # among the inputs or outputs of a module
    call: int = 1
    more: str = ""  # of a collective: verb and axis


@dataclass(frozen=True)
class Part:
    """One entry of one rank's record; `values` reads it."""

    file: Path
    axes: Mapping[str, Sequence[int]]
    rank: int
    sp: bool
    entry: Mapping[str, Any]

    def values(self) -> Tensor:
        """Return the tensor, in its own dtype."""
        count, dtype = self.entry["bytes"], DTYPES[self.entry["dtype"]]
        if not count:  # an expert's rows, where no token chose it
            return torch.empty(self.entry["shape"], dtype=dtype)
        with open(self.file, "rb") as file:
            file.seek(self.entry["at"])
            data = np.fromfile(file, np.uint8, count)
        return torch.from_numpy(data).view(dtype).view(self.entry["shape"])

    @property
    def tp(self) -> tuple[int, int]:
        """Return the rank's index in tp, and the size of tp."""
        rank, size = self.axes["tp"]
        return rank, size


@dataclass
class JoinedTensor:
    """An assembled tensor. replicas: the tensor of each tp rank, if each should have all of it.

    values: of rank 0, or of all ranks' parts. missing: the part that no rank has, in words.
    """

    values: Tensor
    replicas: list[Tensor] = field(default_factory=list)
    missing: str = ""

    @property
    def distances(self) -> float:
        """Return the largest distance of the replicas, relative to the norm."""
        if len(self.replicas) < 2:
            return 0.0
        first = self.replicas[0].double()
        return max(distance(first, other.double()) for other in self.replicas[1:])


def distance(one: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """Return the norm of a difference over the larger norm, at least `floor`: 0 if both are 0.

    The result is infinity if a value is finite on one side only, or the shapes differ.
    """
    if one.shape != other.shape:
        return float("inf")
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    one, other = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (one, other))
    size = max(float(one.norm()), float(other.norm()), floor)
    return float((one - other).norm()) / size if size else 0.0


class Side:
    """One run's record of a step: rank-N.json and rank-N.bin of each rank in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: dict[Key, list[Part]] = defaultdict(list)
        self.order: dict[Key, tuple[Any, ...]] = {}  # the first place of a key in the step
        self.ready: dict[str, tuple[Any, ...]] = {}  # the place at which a gradient is complete
        self.numbers: dict[str, float] = {}
        self.sizes: dict[str, int] = {}
        self.places: dict[tuple[int, int], Tensor] = {}  # by rank and micro-batch [b, s/cp]
        files = sorted(folder.glob("rank-*.json"), key=lambda p: int(p.stem[5:]))
        if not files:
            raise ValueError(f"{folder}: no rank has recorded a step there")
        for path in files:
            self._read(path)
        batch = [p.entry for p in self.parts[Key("batch", "", "tokens")]]
        self.first = min(entry["first"] for entry in batch)  # sample of the global order
        self.rows = max(entry["first"] + entry["rows"] for entry in batch) - self.first

    def _read(self, path: Path) -> None:
        record = json.loads(path.read_text())
        data, axes = path.with_suffix(".bin"), record["axes"]
        self.sizes = {name: size for name, (_, size) in axes.items()}
        self.numbers |= record["numbers"]
        for number, entry in enumerate(record["entries"]):
            if entry["group"] == "order":
                at = _when(entry, number, backward=True)
                self.ready[entry["name"]] = max(at, self.ready.get(entry["name"], at))
                continue
            part = Part(data, axes, record["rank"], record["sp"], entry)
            if entry["group"] == "places":
                self.places[record["rank"], entry["micro_batch"]] = part.values()
                continue
            key = _key(entry)
            self.parts[key].append(part)
            at = _when(entry, number, backward=key.kind.endswith("gradient"))
            self.order[key] = min(at, self.order.get(key, at))

    @cached_property
    def length(self) -> int:
        """Return s, the tokens of a row."""
        return 1 + max(int(places.max()) for places in self.places.values())

    @cached_property
    def dtype(self) -> str:
        """Return the dtype of the run's activations."""
        kinds = (p[0].entry["dtype"] for k, p in self.parts.items() if k.group == "activation")
        return str(next(kinds, "float64"))

    @cached_property
    def modules(self) -> dict[str, str]:
        """Return each parameter's name in the model, by the first of its canonical names."""
        return {
            key.name: parts[0].entry["module"]
            for key, parts in self.parts.items()
            if key.group == "parameter"
        }

    @cached_property
    def sites(self) -> dict[str, str]:
        """Return the line of the program that calls each module."""
        return {
            key.name: parts[0].entry["site"]
            for key, parts in self.parts.items()
            if key.group == "activation" and parts[0].entry["site"]
        }

    # activations

    def activation(self, key: Key, like: Sequence[int] | None = None) -> JoinedTensor | None:
        """Assemble an activation: [samples, positions, ...]; None if that is not possible.

        like: the shape of the other side's whole tensor, if that is known.
        """
        parts = self.parts.get(key, [])
        by_rank: dict[int, list[Part]] = defaultdict(list)
        for part in parts:
            by_rank[part.tp[0]].append(part)
        if not parts:
            return None
        size, first = parts[0].tp[1], parts[0].entry
        grids = {rank: self._tokens(some) for rank, some in by_rank.items()}
        if any(grid is None for grid in grids.values()) or len(grids) != size:
            return None
        placed = [grid for _, grid in sorted(grids.items()) if grid is not None]
        if all(cut for _, cut, _ in placed) and size > 1:  # the ranks have different tokens
            values = placed[0][0].clone()
            for tensor, _, seen in placed[1:]:
                values[seen] = tensor[seen]
            return JoinedTensor(values)
        each = [tensor for tensor, _, _ in placed]
        if size == 1:
            return JoinedTensor(_narrowed(each[0], first.get("sections", ())))
        partial = key.kind.endswith("gradient")
        return joined(each, first.get("region", ""), first.get("sections", ()), like, partial)

    def _tokens(self, parts: Sequence[Part]) -> tuple[Tensor, bool, Tensor] | None:
        """Place one tp rank's parts of all micro-batches: (tensor, sequence is cut, its tokens).

        None if the tensor has no tokens.
        """
        out: Tensor | None = None
        seen = torch.zeros(self.rows, self.length, dtype=torch.bool)
        was_cut = False
        for part in parts:
            entry, x = part.entry, part.values()
            places = self.places[part.rank, entry["micro_batch"]]
            rows, tokens = places.shape
            rank, size = part.tp
            slices = {tokens: slice(None)}
            if part.sp and tokens % size == 0:
                low = rank * tokens // size
                slices[tokens // size] = slice(low, low + tokens // size)
            shape = tuple(x.shape)
            # the gradient of what all rows share is a sum over the rows of a micro-batch
            of_rows = (rows,) if entry.get("kind", "").endswith("gradient") else (rows, 1)
            if x.dim() == 2 and shape == (rows, tokens):
                x, own = x.unsqueeze(-1), slices[tokens]
            elif x.dim() == 2 and entry.get("region") and shape[0] / rows in slices:
                x = x.unflatten(0, (-1, rows)).transpose(0, 1)  # tokens of all rows in one
                own = slices[shape[0] // rows]
                was_cut = was_cut or (size > 1 and shape[0] // rows != tokens)
            elif x.dim() >= 2 and shape[0] in slices and shape[1] in of_rows:
                x = x.transpose(0, 1).expand(rows, *x.transpose(0, 1).shape[1:])
                own = slices[shape[0]]
                was_cut = was_cut or (size > 1 and shape[0] != tokens)
            else:
                return None
            if out is None:
                out = x.new_zeros((self.rows, self.length, *x.shape[2:]))
            if out.shape[2:] != x.shape[2:]:
                return None
            low = entry["first"] - self.first
            at = torch.arange(low, low + rows)[:, None]
            out[at, places[:, own]] = x
            seen[at, places[:, own]] = True
        return None if out is None else (out, was_cut, seen)

    # parameters

    def parameter(self, key: Key) -> dict[str, JoinedTensor]:
        """Assemble a parameter's weight, state, or summed gradient, by canonical name."""
        return _placed(_locals(self.parts.get(key, [])))

    def whole(self, kind: str, when: str = "") -> dict[str, Tensor]:
        """Return all weights, states or gradients of a kind, by canonical name."""
        keys = [k for k in self.parts if (k.group, k.kind, k.phase) == ("parameter", kind, when)]
        return {name: x.values for key in keys for name, x in self.parameter(key).items()}

    def own_total(self, key: Key) -> dict[str, JoinedTensor]:
        """Sum the ranks' own gradients, in fp64, over the ranks that the placement defines."""
        added: dict[tuple[Any, ...], tuple[Part, Tensor]] = {}
        for part in self.parts.get(key, []):
            entry = part.entry
            # ranks that hold the same part: their gradients are parts of one sum
            group = ("all",) if entry["sums"] else tuple(entry["data"])
            where = (group, tuple(tuple(piece[:1] + piece[2:]) for piece in entry["pieces"]))
            values = part.values().double()
            added[where] = (part, added[where][1] + values if where in added else values)
        return _placed(added)


def _narrowed(x: Tensor, sections: Sequence[Sequence[int]]) -> Tensor:
    """Drop the padding of one rank's only section."""
    if len(sections) == 1 and sections[0][0] < x.shape[-1]:
        return x[..., : sections[0][0]]
    return x


def joined(
    each: Sequence[Tensor],
    region: str,
    sections: Sequence[Sequence[int]],
    like: Sequence[int] | None,
    partial: bool = False,
) -> JoinedTensor | None:
    """Join the tp ranks' tensors of the same tokens: each [samples, positions, ...]. partial: what
    ranks share, as a key/value head, is a part of a sum on each of them.

    like: the shape of the whole; None if it is not known: features are then assumed to be cut if
    the layer declares that. Returns None if no way of joining has that shape.
    """
    shape, size = list(each[0].shape), len(each)
    if sections:
        found = [_section(each, at, full, local, partial) for at, full, local in _at(sections)]
        return JoinedTensor(torch.cat(found, -1))
    if region != INSIDE and (like is None or list(like) == shape):
        return JoinedTensor(each[0], list(each))
    if like is None:
        dim = 2 if len(shape) == 4 else len(shape) - 1
        return JoinedTensor(torch.cat(list(each), dim))
    if len(like) == len(shape):
        unlike = [i for i, (n, m) in enumerate(zip(shape, like, strict=True)) if n != m]
        if not unlike:
            if partial:  # a head that all ranks share
                return JoinedTensor(torch.cat(_shared(each, size, partial)))
            return JoinedTensor(each[0], list(each))
        if len(unlike) == 1:
            (dim,) = unlike
            times = like[dim] / shape[dim]
            if times == int(times) and size % int(times) == 0:
                return JoinedTensor(torch.cat(_shared(each, size // int(times), partial), dim))
    return None


def _at(sections: Iterable[Sequence[int]]) -> Iterable[tuple[int, int, int]]:
    low = 0
    for full, local in sections:
        yield low, full, local
        low += local


def _section(each: Sequence[Tensor], low: int, full: int, local: int, partial: bool) -> Tensor:
    """Join one section of the features: without padding, and each shared part once, or summed."""
    shared = max(1, len(each) * local // full) if full % local == 0 else 1
    own = [x[..., low : low + local] for x in each]
    return torch.cat(_shared(own, shared, partial), -1)[..., :full]


def _shared(each: Sequence[Tensor], ranks: int, partial: bool) -> list[Tensor]:
    """Return a tensor for every `ranks` adjacent ranks: the first's, or the sum of their parts."""
    groups = [each[i : i + ranks] for i in range(0, len(each), ranks)]
    return [sum(group[1:], group[0]) if partial else group[0] for group in groups]


def _locals(parts: Iterable[Part]) -> dict[tuple[Any, ...], tuple[Part, Tensor]]:
    """Assemble each local parameter from the shards that its data-parallel ranks own."""
    found: dict[tuple[Any, ...], tuple[Part, Tensor]] = {}
    for part in parts:
        entry, values = part.entry, part.values().flatten()
        count = int(np.prod(entry["local"]))
        # a rank that owns all of it has a copy of its own
        holder = (part.rank,) if len(values) == count else tuple(entry["data"])
        if holder not in found:
            found[holder] = (part, values.new_zeros(count))
        found[holder][1][entry["first"] : entry["first"] + len(values)] = values
    return {at: (part, flat.view(part.entry["local"])) for at, (part, flat) in found.items()}


def _placed(parts: Mapping[tuple[Any, ...], tuple[Part, Tensor]]) -> dict[str, JoinedTensor]:
    """Place local parameters in the canonical tensors; keep replicas of the same rectangle."""
    full: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    dims: dict[str, int] = {}
    copies: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for part, values in parts.values():
        for name, shape, dim, start, size, local in part.entry["pieces"]:
            x = values.view(part.entry["local"]).narrow(dim, local, size)
            if name not in full:
                full[name] = x.new_zeros(shape)
                held[name], dims[name] = torch.zeros(shape[dim], dtype=torch.bool), dim
            held[name][start : start + size] = True
            copies[name, dim, start, size].append(x)
            full[name].narrow(dim, start, size).copy_(copies[name, dim, start, size][0])
    most = {
        name: max((c for k, c in copies.items() if k[0] == name), key=len, default=[])
        for name in full
    }
    return {
        name: JoinedTensor(values, most[name], missing=_missing(held[name], dims[name]))
        for name, values in full.items()
    }


def _missing(held: Tensor, dim: int) -> str:
    """Return from which row on, along a dimension, no rank holds a tensor, in words, or ""."""
    if held.all():
        return ""
    first = int((~held).nonzero()[0])
    return f"no rank holds its rows from {first} on, along dimension {dim}"


def _key(entry: Mapping[str, Any]) -> Key:
    group, name = entry["group"], entry["name"]
    if group == "batch":
        return Key(group, "", name)
    if group == "parameter":
        return Key(group, entry["kind"], name, entry["when"])
    phase, call = entry["phase"], entry["call"]
    if group == "collective":
        what = f"{entry['verb']} over {entry['axis']}"
        return Key(group, entry["kind"], name, phase, call=call, more=what)
    return Key(group, entry["kind"], name, phase, entry["index"], call)


def _when(entry: Mapping[str, Any], number: int, backward: bool) -> tuple[Any, ...]:
    """Return the sort key of an entry in its phase: micro-batch, stage, place in the record."""
    stage = entry.get("stage", 0)
    return (entry.get("micro_batch", 0), -stage if backward else stage, number)
