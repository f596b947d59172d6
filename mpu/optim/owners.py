# SPDX-License-Identifier: Apache-2.0
"""Compute which rank updates which full matrix, and the messages for it: pure arithmetic.

A rule of full matrices assembles each matrix on one rank, its owner. Its state stays sharded as
ZeRO shards it. In a step each matrix is sent once to its owner, and its update back:

    member (c, s)   holds share s of the part at place c of the cutting axis
    sources         members that send a part of the matrix to its owner: each element once
    holders         members that hold a part of the matrix: each gets its part of the update

The ranks of an instance of the optimizer, in a stage of the pipeline, are the members
(Grid.instance). At ZeRO stage 0 every s holds everything, and a matrix that is replicated over the
cutting axis is held by every c: then the source has the owner's own s, or c. A run, the dry run and
the planner use the same plan.

    matrices_of     the matrices of a parameter: its sections, or fused sections
    plan_of         an owner for each, and the rounds of the exchange: one per bucket
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from mpu.comm.transport import Splits
from mpu.grid import DATA, Grid
from mpu.param import Placement
from mpu.zero.bucket_layout import BucketLayout


class Cut(NamedTuple):
    """A rectangle: rows [to, to + size) of the matrix along `dim` are rows [at, ...) of a part."""

    dim: int
    to: int
    at: int
    size: int


class Part(NamedTuple):
    """The part of a matrix at one place of the cutting axis.

    place: -1 if every place holds it. The part is elements [low, high) of the flattened local
    parameter, in rows of `width`. cuts: their positions in the matrix; padding has none.
    """

    place: int
    low: int
    high: int
    width: int
    cuts: tuple[Cut, ...]


class Split(NamedTuple):
    """Which fused sections of a parameter are matrices of their own.

    qkv: queries, keys and values. others: all others, such as gate and up.
    """

    qkv: bool = True
    others: bool = True


class FullMatrix(NamedTuple):
    """A matrix that one rank assembles: a section of a parameter, or fused sections."""

    parameter: str
    label: str  # which section of the parameter; "": all of it
    rows: int
    columns: int
    parts: tuple[Part, ...]
    bucket: int = 0  # where its parameter begins
    offset: int = 0  # where its parameter begins in the bucket

    @property
    def name(self) -> str:
        """Return the parameter's name and the label."""
        return self.parameter + f"[{self.label}]" * bool(self.label)

    @property
    def cost(self) -> int:
        """Return the FLOPs of a Newton-Schulz step, 4 m^2 n + 2 m^3 where m <= n."""
        m, n = sorted((self.rows, self.columns))
        return 4 * m * m * n + 2 * m**3


def matrices_of(
    name: str, place: Placement, shape: Sequence[int], split: Split, group: str = "matrix"
) -> list[FullMatrix]:
    """Return the matrices of a parameter. shape: of a rank's part. group: the model's name of it.

    Raises ValueError if the parameter is not a matrix, or several sections are cut by columns.
    """
    if len(shape) != 2:
        raise ValueError(
            f"parameter_group of the --model-file returns {group!r} for {name}, of shape "
            f"{list(shape)}, which is not a matrix: return 'vector', or stack the matrices of "
            "experts along dim 0 as sections (mpu/layers/experts.py)"
        )
    sizes = place.sections or (place.shape[0],)
    if place.dim == 1 and len(sizes) > 1:
        raise ValueError(
            f"{name}: its Placement cuts {len(sizes)} sections by columns, so no rank has whole "
            "rows of a section: cut them by rows (dim=0)"
        )
    fused = 1 if (split.qkv if place.qkv else split.others) else place.fused or len(sizes)
    of_section: list[list[tuple[int, int, Cut]]] = [[] for _ in sizes]  # place, row at, cut
    names = [str(i) for i in range(len(sizes))]
    for c in range(place.axis.size) if place.dim is not None else (-1,):
        there = replace(place, axis=replace(place.axis, rank=max(c, 0)))
        for piece in there.pieces(names):
            at, to = (piece.local, 0) if piece.dim == 0 else (0, piece.local)
            found = of_section[int(piece.name)]
            found.append((c, at, Cut(piece.dim, piece.start, to, piece.size)))
    width, made = shape[1], []
    for first in range(0, len(sizes), fused):
        run = range(first, first + fused)
        rows_of: dict[int, list[tuple[int, int, Cut]]] = {}  # by place: base, row at, cut
        base = 0
        for section in run:
            for c, at, cut in of_section[section]:
                rows_of.setdefault(c, []).append((base, at, cut))
            base += sizes[section]
        parts = []
        for c, pieces in rows_of.items():
            if pieces[0][2].dim == 1:  # all rows, some columns
                ((_, _, cut),) = pieces
                parts.append(Part(c, 0, prod(shape), width, (cut,)))
                continue
            begin = min(at for _, at, _ in pieces)
            cuts = tuple(
                Cut(0, base + cut.to, at - begin, cut.size) for base, at, cut in pieces if cut.size
            )
            end = max([begin, *(at + cut.size for _, at, cut in pieces)])
            parts.append(Part(c, begin * width, end * width, width, cuts))
        label = "" if fused == len(sizes) else _label(place, first, fused)
        made.append(FullMatrix(name, label, base, place.shape[1], tuple(parts)))
    return made


def _label(place: Placement, first: int, fused: int) -> str:
    if place.qkv:
        return "qkv"[first : first + fused] if len(place.sections) == 3 else str(first)
    if place.whole_sections and place.fused:
        expert, section = divmod(first, place.fused)
        return f"{expert}" if fused > 1 or place.fused == 1 else f"{expert}.{section}"
    return str(first)


class Member(NamedTuple):
    """A rank of an optimizer instance: its place on the cutting axis, and its share."""

    cut: int
    share: int


@dataclass(frozen=True)
class Round:
    """Matrices that are exchanged together: those of one bucket, by their index in the plan."""

    bucket: int
    cut: str
    matrices: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Owners of all matrices of a pipeline stage."""

    matrices: tuple[FullMatrix, ...]
    owners: tuple[int, ...]  # of each matrix: the index of its owner among the members
    cuts: tuple[str, ...]  # of each matrix: the axis that cuts it
    members: Mapping[str, tuple[Member, ...]]  # by the cutting axis, in the order of Grid.instance
    # of each bucket: elements of a shard, and whether the bucket is sharded
    own: tuple[tuple[int, bool], ...]
    rounds: tuple[Round, ...]

    def range_of(self, matrix: FullMatrix, member: Member) -> tuple[int, int]:
        """Return [low, high) of the member's flattened parameter that belong to the matrix."""
        part = part_at(matrix, member.cut)
        if part is None:
            return 0, 0
        size, shared = self.own[matrix.bucket]
        if not shared:
            return part.low, part.high
        begin = member.share * size - matrix.offset
        low, high = max(part.low, begin), min(part.high, begin + size)
        return (low, high) if low < high else (0, 0)

    @cached_property
    def _place(self) -> dict[str, dict[Member, int]]:
        return {cut: {m: i for i, m in enumerate(of)} for cut, of in self.members.items()}

    def holders(self, number: int) -> Iterator[tuple[int, Member, int, int]]:
        """Yield (place, member, low, high) of each member that holds a part of a matrix: elements
        [low, high) of its parameter.
        """
        matrix, places = self.matrices[number], self._place[self.cuts[number]]
        cut_size, share_size = (1 + max(of) for of in zip(*places, strict=True))
        size, shared = self.own[matrix.bucket]
        for part in matrix.parts:
            shares = range(share_size)
            if shared:
                first, last = (matrix.offset + n for n in (part.low, part.high - 1))
                shares = range(first // size, last // size + 1)
            for c in range(cut_size) if part.place < 0 else (part.place,):
                for s in shares if part.low < part.high else ():
                    member = Member(c, s)
                    yield places[member], member, *self.range_of(matrix, member)

    def sources(self, number: int) -> Iterator[tuple[int, Member, int, int]]:
        """Yield, like `holders`, the members that send to the owner: each element once."""
        for found in self.holders(number):
            if self.is_source(number, found[1]):
                yield found

    def is_source(self, number: int, member: Member) -> bool:
        """Return whether a member that holds a part of a matrix sends it to the owner."""
        matrix = self.matrices[number]
        owner = self.members[self.cuts[number]][self.owners[number]]
        if matrix.parts[0].place < 0 and member.cut != owner.cut:
            return False
        return self.own[matrix.bucket][1] or member.share == owner.share

    def splits(self, round_: Round, me: int) -> Splits:
        """Return the elements that `me` sends to owners in a round, and receives as an owner."""
        members = self.members[round_.cut]
        sent, got = [0] * len(members), [0] * len(members)
        for number in round_.matrices:
            low, high = self.range_of(self.matrices[number], members[me])
            sent[self.owners[number]] += (high - low) * self.is_source(number, members[me])
            if self.owners[number] == me:
                for source, _, low, high in self.sources(number):
                    got[source] += high - low
        return Splits(tuple(sent), tuple(got))

    def back(self, round_: Round, me: int) -> Splits:
        """Return the elements of updates that `me` sends as an owner, and receives as a holder."""
        members = self.members[round_.cut]
        sent, got = [0] * len(members), [0] * len(members)
        for number in round_.matrices:
            low, high = self.range_of(self.matrices[number], members[me])
            got[self.owners[number]] += high - low
            if self.owners[number] == me:
                for i, _, low, high in self.holders(number):
                    sent[i] += high - low
        return Splits(tuple(sent), tuple(got))

    @cached_property
    def loads(self) -> dict[str, list[int]]:
        """Return the FLOPs of a Newton-Schulz step of each member, by the cutting axis."""
        found = {cut: [0] * len(members) for cut, members in self.members.items()}
        for matrix, cut, owner in zip(self.matrices, self.cuts, self.owners, strict=True):
            found[cut][owner] += matrix.cost
        return found


def part_at(matrix: FullMatrix, place: int) -> Part | None:
    """Return the part of a matrix at a place of the cutting axis, or None."""
    return next((part for part in matrix.parts if part.place in (-1, place)), None)


def members_of(grid: Grid) -> dict[str, tuple[Member, ...]]:
    """Return the members of this rank's instance by the axis that cuts parameters."""
    found = {}
    for cut in DATA:
        rows = grid.places(cut)
        at = {rank: Member(c, s) for s, row in enumerate(rows) for c, rank in enumerate(row)}
        found[cut] = tuple(at[rank] for rank in sorted(at))
    return found


def plan_of(
    layouts: Sequence[BucketLayout],
    placements: Mapping[str, tuple[Placement, Sequence[int]]],
    groups: Collection[str],
    split: Split,
    members: Mapping[str, tuple[Member, ...]],
) -> Plan:
    """Return the plan for all matrices of a pipeline rank: the same on all ranks of an instance.

    placements: by parameter, with the local shape. groups: those of the rule. Raises ValueError as
    matrices_of does.
    """
    matrices: list[FullMatrix] = []
    cuts, rounds = [], []
    for i, layout in enumerate(layouts):
        first = len(matrices)
        for (name, offset, _), group in zip(layout.params, layout.groups, strict=True):
            if group in groups:
                found = matrices_of(name, *placements[name], split, group)
                matrices += [each._replace(bucket=i, offset=offset) for each in found]
        if first < len(matrices):
            cut = layout.sharing.cut
            cuts += [cut] * (len(matrices) - first)
            rounds.append(Round(i, cut, tuple(range(first, len(matrices)))))
    own = tuple((layout.own, bool(layout.sharing.zero_stage)) for layout in layouts)
    bare = Plan(tuple(matrices), (0,) * len(matrices), tuple(cuts), members, own, tuple(rounds))
    return replace(bare, owners=tuple(_owners(bare)))


def _owners(plan: Plan) -> list[int]:
    """Assign each matrix to a member: the largest first, to the member with the least work so far.

    This is Graham's longest-processing-time rule, with one exception: the member that holds most of
    the matrix gets it if its work stays at or below an even share. The bound is the same, and a
    matrix that is not shared, such as an expert's, is not sent.
    """
    owners = [0] * len(plan.matrices)
    together = len({len(members) for members in plan.members.values()}) == 1
    shared = {cut: [0] * len(members) for cut, members in plan.members.items()}
    if together:  # the same ranks, in the same order: one count of their work
        one = next(iter(shared.values()))
        shared = dict.fromkeys(shared, one)
    totals = {cut: 0 for cut in shared}
    for matrix, cut in zip(plan.matrices, plan.cuts, strict=True):
        totals[cut] += matrix.cost
    if together:
        totals = dict.fromkeys(totals, sum(totals.values()))
    heaps = {id(load): [(0, i) for i in range(len(load))] for load in shared.values()}
    numbers = range(len(plan.matrices))
    for number in sorted(numbers, key=lambda i: (-plan.matrices[i].cost, i)):
        cost, cut = plan.matrices[number].cost, plan.cuts[number]
        load, heap = shared[cut], heaps[id(shared[cut])]
        while heap[0][0] != load[heap[0][1]]:  # an outdated entry: it has more work now
            heappop(heap)
        owned = [(high - low, -load[i], -i) for i, _, low, high in plan.holders(number)]
        local, owner = -max(owned, default=(0, 0, 0))[2], heap[0][1]
        if load[local] + cost <= -(-totals[cut] // len(load)):
            owner = local
        owners[number] = owner
        load[owner] += cost
        heappush(heap, (load[owner], owner))
    return owners
