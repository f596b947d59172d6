# SPDX-License-Identifier: Apache-2.0
"""Digests of gradients and weights: a few numbers per tensor, the same for every layout.

    exact     sum over the elements of bits x row key x column key, modulo 2^64
    sketch    the norm, and two sums of the elements with random signs: row sign x column sign

Keys and signs depend only on the tensor's canonical name and the element's position in the whole
tensor, so the digests of the ranks' parts add up, however the tensor is cut: each rank digests the
elements that it owns, and one sum over all ranks of these few numbers completes them. A flipped bit
always changes the exact sum, as keys are odd. The difference of two sketches is on average that of
the tensors (Alon, Matias and Szegedy 1996; signs that are products of two are the sketch of
Braverman et al. 2010).

`digest_of` is the exact sum of a single rank's tensor, for comparing replicas (replica_check.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpu import native
from mpu.comm.collectives import all_reduce, gather_bytes
from mpu.comm.transport import Label
from mpu.grid import Grid
from mpu.param import placement_of
from mpu.zero.bucket import ParamAndGradBucket

SIGNS = 2  # sums with random signs
# elements that are widened to 64 bits at a time: few enough for the cache of a CPU; elsewhere
# enough for few launches
AT_ONCE, LARGE = 1 << 16, 1 << 22
ROW = 1 << 10  # elements per row in `digest_of`
WIDTHS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
LABEL = Label("digests", "digests")
KINDS = ("gradient", "weight")


def keys(text: str, first: int, count: int, device: torch.device) -> Tensor:
    """Return odd 64-bit keys for places first, first + 1, ...: SplitMix64 (Steele et al. 2014).

    text: the name of the sequence, from which it is seeded.
    """
    seed = 0xCBF29CE484222325  # FNV-1a
    for byte in text.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    place = torch.arange(first + 1, first + count + 1, device=device)
    x = place * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return (x ^ _shifted(x, 31)) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right logically, without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def signs(key: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    """Return 1 or -1 for each key, from a bit of it that `number` selects."""
    return (((key >> (40 + number)) & 1) * 2 - 1).to(dtype)


class _Cut(NamedTuple):
    """A rectangle of a canonical tensor in a flat local parameter: rows of `width` elements."""

    number: int  # of the canonical name
    base: int  # flat index of its first element
    stride: int  # from row to row
    rows: int  # of the local part
    width: int  # of the local part
    row: int  # row of its first element in the whole tensor
    column: int  # column of its first element in the whole tensor


class StateDigest:
    """Digests the gradients and the weights, or masters, of one run. Collective.

    optimizer: mpu.optim.optimizer.Optimizer. table: the canonical names of each parameter. names:
    those of all tensors of the model, in the order of the results of `run`.
    """

    def __init__(self, grid: Grid, optimizer: Any, table: Mapping[str, Sequence[str]]) -> None:
        self.grid, self.optimizer = grid, optimizer
        buckets: Sequence[ParamAndGradBucket] = optimizer.sink.buckets
        self.device = optimizer.sink.device
        own = [n for b in buckets for name, _, _ in b.params for n in table[name]]
        for axis in (grid.pp, grid.ep):
            texts = gather_bytes("\n".join(own).encode(), axis, self.device)
            own = list(dict.fromkeys(n for text in texts for n in text.decode().splitlines()))
        self.names = sorted(own)
        number = {name: i for i, name in enumerate(self.names)}
        self._work = [[*self._parts(bucket, table, number)] for bucket in buckets]
        self._keys: dict[tuple[int, str, int, int], Tensor] = {}

    def _parts(
        self,
        bucket: ParamAndGradBucket,
        table: Mapping[str, Sequence[str]],
        number: Mapping[str, int],
    ) -> Iterator[tuple[int, int, int, _Cut]]:
        """Yield (low, high, start, cut) for elements [low, high) of the bucket that this rank must
        digest.

        If several ranks own the same elements, each digests an equal part.
        """
        params = {name: param for name, param, _ in bucket.params}
        for name, low, high, start in bucket.owned():
            param = params[name]
            place, peers = placement_of(param), self.optimizer.sink.holders(param)
            if not place.first_holder:
                continue
            count = high - low
            low, high = (low + count * (peers.rank + i) // peers.size for i in range(2))
            for piece in place.pieces(table[name]):
                behind = torch.Size(param.shape[piece.dim + 1 :]).numel()
                before = torch.Size(param.shape[: piece.dim]).numel()
                stride, size = param.shape[piece.dim] * behind, piece.size * behind
                if piece.dim == 0:  # rows of the matrix are rows here
                    cut = (piece.local * behind, behind, piece.size, behind, piece.start, 0)
                else:
                    at = (piece.local * behind, stride, before, size)
                    cut = (*at, 0, piece.start * behind)
                yield low, high, start, _Cut(number[piece.name], *cut)

    @torch.no_grad()
    def run(self) -> tuple[Tensor, Tensor]:
        """Return the digests of all tensors: exact [n, 2] int64, sketches [n, 2, 3] fp64.

        The second dimension is KINDS; a sketch is (norm, signed sum, signed sum).
        """
        n = len(self.names)
        exact = torch.zeros(n, 2, dtype=torch.int64, device=self.device)
        sketch = torch.zeros(n, 2, 1 + SIGNS, dtype=torch.float64, device=self.device)
        optimizer = self.optimizer
        optimizer.sink.wait_for_weights()
        for bucket, master, work in zip(
            optimizer.sink.buckets, optimizer.masters, self._work, strict=True
        ):
            for low, high, start, cut in work:
                for kind, flat in enumerate((bucket.grad_shard, master.detach())):
                    values = flat[low - bucket.low : high - bucket.low]
                    self._add(values.to(self.device), low - start, cut, exact, sketch, kind)
        all_reduce(exact, self.grid.world, label=LABEL)
        all_reduce(sketch, self.grid.world, label=LABEL)
        sketch[..., 0].sqrt_()
        return exact, sketch

    def _add(
        self, values: Tensor, first: int, cut: _Cut, exact: Tensor, sketch: Tensor, kind: int
    ) -> None:
        """Add the elements [first, ...) of a flat local parameter that are in the cut."""
        end, at = first + len(values), cut.number
        row = max(0, (first - cut.base) // cut.stride)
        while row < cut.rows and (begin := cut.base + row * cut.stride) < end:
            low, high = max(begin, first), min(begin + cut.width, end)
            if low >= high:
                row += 1
                continue
            rows = 1
            if low == begin and high - low == cut.width:  # all whole rows at once
                rows = min(cut.rows - row, 1 + (end - high) // cut.stride)
            size = (rows, high - low)
            x = values.as_strided(size, (cut.stride, 1), values.storage_offset() + low - first)
            by_row = self._key(at, "row", cut.row + row, rows)
            by_column = self._key(at, "column", cut.column + low - begin, high - low)
            add(x, by_row, by_column, exact[at, kind], sketch[at, kind])
            row += rows

    def _key(self, number: int, which: str, first: int, count: int) -> Tensor:
        made = self._keys.get((number, which, first, count))
        if made is None:
            made = keys(f"{self.names[number]}/{which}", first, count, self.device)
            self._keys[number, which, first, count] = made
        return made


def digest_of(values: Tensor) -> Tensor:
    """Return the exact digest of one tensor, as rows of ROW elements: an int64 scalar on its
    device, without waiting. It depends on the bits, dtype and size, but not on the shape.
    """
    flat, device = values.detach().view(-1), values.device
    by_column, full = keys("column", 0, ROW, device), len(flat) // ROW
    by_row = keys("row", 0, full + 1, device)
    exact = torch.zeros((), dtype=torch.int64, device=device)
    add(flat[: full * ROW].view(-1, ROW), by_row[:full], by_column, exact)
    if rest := len(flat) - full * ROW:
        add(flat[None, full * ROW :], by_row[full:], by_column[:rest], exact)
    return exact


def add(
    x: Tensor, by_row: Tensor, by_column: Tensor, exact: Tensor, sums: Tensor | None = None
) -> None:
    """Add rows x [n, m] with keys by_row [n], by_column [m] to an exact sum, and to a sketch.

    sums [3]: of squares, then with signs. fp32 and fp64 on a CPU use csrc/digest.cpp.
    """
    library, kind = native.load(), (torch.float32, torch.float64)
    takes = x.is_cpu and x.dtype in kind and hasattr(library, "weft_digest")
    if library is None or not takes:
        step = max(1, (AT_ONCE if x.is_cpu else LARGE) // x.shape[1])
        for low in range(0, len(x), step):
            part = slice(low, low + step)
            _add_by_torch(x[part], by_row[part], by_column, exact, sums)
        return
    columns = [signs(by_column, i, x.dtype) for i in range(SIGNS)]
    sums = torch.zeros(1 + SIGNS, dtype=torch.float64) if sums is None else sums
    tensors = (x, by_row, by_column, *columns, exact, sums)
    sizes = (*x.shape, x.stride(0))
    library.weft_digest(
        c_int64(kind.index(x.dtype)), c_int64(1), *(c_void_p(t.data_ptr()) for t in tensors),
        *map(c_int64, sizes),
    )  # fmt: skip


def _add_by_torch(
    x: Tensor, by_row: Tensor, by_column: Tensor, exact: Tensor, sums: Tensor | None
) -> None:
    exact += (_dot(x.view(WIDTHS[x.element_size()]), by_column) * by_row).sum()
    if sums is None:
        return
    sums[0] += torch.linalg.vector_norm(x, dim=1).double().square().sum()
    for i in range(SIGNS):
        signed = (x @ signs(by_column, i, x.dtype)).double()
        sums[1 + i] += (signed * signs(by_row, i, torch.float64)).sum()


def _dot(bits: Tensor, key: Tensor) -> Tensor:
    """Return the sum of bits x key in each row, modulo 2^64: bits [n, m], key [m] -> [n]."""
    if not bits.is_cpu:
        return (bits.long() * key).sum(1)
    return torch.mv(bits.long(), key)
