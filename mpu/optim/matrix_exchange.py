# SPDX-License-Identifier: Apache-2.0
"""Update full matrices of which each rank has a slice: send slices to an owner, and updates back.

    start   prepare(slice)   every rank, its slices: new state, and the message to the owner
            all_to_all       slices to the owners, one bucket at a time, one bucket ahead
    step    full_update()    the owner only: each matrix once per instance of the optimizer
            all_to_all       the update's slices back, one bucket at a time
            apply(slice)     every rank, its slices

Between `start` and `step` other rules update, so the first exchange overlaps AdamW's update. The
exchange of each later bucket overlaps the full_update of the previous one. Updates are applied once
all matrices are done: a rank without work in one bucket does not wait for those with more.
mpu/optim/owners.py computes the owners and the messages.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from mpu.comm.collectives import all_to_all, gather_bytes
from mpu.comm.transport import Axis, Handle, Label, Splits
from mpu.optim.interface import Matrix, Parts, SegmentUpdater, UpdateRule
from mpu.optim.owners import FullMatrix, Plan, Round, part_at


class MatrixUpdater(SegmentUpdater):
    """Holds the state of a rank's slices, and assembles matrices. A rule implements three methods.

    Raises ValueError if the ranks of an instance do not agree on the plan.
    """

    def __init__(self, rule: UpdateRule, parts: Parts) -> None:
        super().__init__(rule, parts)
        assert parts.plan is not None, "an update rule of full matrices needs a plan"
        self.plan, axes = parts.plan, parts.instances
        self.group_of = {group["name"]: group for group in self.groups}
        mine = {matrix.name: matrix for matrix in parts.matrices}
        self.exchanges = [
            _RankRound(self.plan, round_, axes[round_.cut], mine)
            for round_ in self.plan.rounds
            if self.plan.matrices[round_.matrices[0]].parameter in mine
        ]
        device = parts.matrices[0].param.device
        self._wire = rule.wire(parts.master)
        self._arriving: list[tuple[Tensor, Handle]] = []
        self._last: tuple[Tensor, Tensor] | None = None  # factor and found_inf of this step
        self._check_plan(mine)
        digest = sha256(
            repr((self.plan.owners, self.plan.rounds, self.plan.matrices)).encode()
        ).digest()
        for axis in {round_.axis.name: round_.axis for round_ in self.exchanges}.values():
            digests = gather_bytes(digest, axis, device)
            if different := [
                r for r, one in zip(axis.ranks, digests, strict=True) if one != digest
            ]:
                raise ValueError(
                    f"{rule.name}: rank {axis.ranks[axis.rank]} and rank {different[0]} do not "
                    "agree on which rank owns which matrix: their parameters or placements differ"
                )

    def _check_plan(self, mine: Mapping[str, Matrix]) -> None:
        """Raise RuntimeError unless the rounds contain each matrix of these parameters once.

        All ranks agree on the plan, and a step checks that a rank updates as many matrices as it
        owns: so all ranks together update each matrix once.
        """
        expected = {i for i, m in enumerate(self.plan.matrices) if m.parameter in mine}
        found = [number for round_ in self.exchanges for number in round_.round.matrices]
        if sorted(found) != sorted(expected):
            raise RuntimeError(
                f"{self.rule.name}: the plan moves {len(found)} matrices, but these parameters "
                f"have {len(expected)}"
            )
        self._owned = sum(len(round_.owned) for round_ in self.exchanges)

    @abstractmethod
    def prepare(
        self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a slice's part of the message and its new state; change nothing in place."""

    @abstractmethod
    def full_update(self, matrix: Tensor, which: FullMatrix) -> Tensor:
        """Return the update of a full matrix, in its shape and dtype; may overwrite `matrix`."""

    @abstractmethod
    def apply(
        self, weight: Tensor, update: Tensor, which: FullMatrix, group: Mapping[str, Any]
    ) -> Tensor:
        """Return the new values of a slice of a matrix, given its part of the update."""

    @torch.no_grad()
    def start(self, factor: Tensor, found_inf: Tensor) -> None:
        self._last = factor, found_inf
        self.count(found_inf)
        self._arriving = [self._send(self.exchanges[0])]

    @torch.no_grad()
    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        if self._last is None:
            self.start(factor, found_inf)
        back, done = [], 0
        for i, round_ in enumerate(self.exchanges):
            arrived, handle = self._arriving.pop(0)
            if i + 1 < len(self.exchanges):
                self._arriving.append(self._send(self.exchanges[i + 1]))
            handle.wait()
            updates = {number: self.full_update(m, w) for number, w, m in round_.matrices(arrived)}
            done += len(updates)
            out = round_.updates(updates, arrived)
            back.append(all_to_all(out, round_.axis, True, round_.back, round_.label))
        if done != self._owned:
            raise RuntimeError(f"{self.rule.name}: {done} matrices were updated, not {self._owned}")
        for round_, (update, handle) in zip(self.exchanges, back, strict=True):
            handle.wait()
            update = update.to(found_inf.device)  # where the weights are
            for piece, (low, high) in round_.pieces_back():
                segment = piece.matrix.segment
                assert segment is not None
                part, group = segment[piece.low : piece.high], self.group_of[piece.matrix.group]
                mine = update[low:high].to(part.dtype)
                _put(self.apply(part, mine, piece.which, group), part, found_inf)
        self._last = None

    def _send(self, round_: "_RankRound") -> tuple[Tensor, Handle]:
        """Update a bucket's state, and start its messages to the owners."""
        assert self._last is not None
        factor, found_inf = self._last
        travels: dict[str, Tensor] = {}
        for matrix in round_.slices:
            segment = matrix.segment
            assert segment is not None
            state, grad = self._state[segment], self.scaled(segment, factor)
            travels[matrix.name], new = self.prepare(grad, state, self.group_of[matrix.group])
            for name, values in state.items():
                _put(new[name], values, found_inf)
        parts = [travels[p.matrix.name][p.low : p.high] for p in round_.pieces if p.sends]
        # state may be in host memory, but messages are sent from the device
        home = next((part.device for part in parts), round_.device)
        wire = torch.empty(sum(round_.there.input), dtype=self._wire, device=home)
        at = 0
        for part in parts:
            wire[at : at + len(part)] = part
            at += len(part)
        return all_to_all(wire.to(round_.device), round_.axis, True, round_.there, round_.label)


def _put(new: Tensor, into: Tensor, found_inf: Tensor) -> None:
    """Write new values, unless found_inf is 1; the host does not wait for it."""
    torch.where(found_inf == 1, into, new, out=into)


class _Piece:
    """A rank's part of one matrix: elements [low, high) of its slice of the parameter."""

    def __init__(
        self, number: int, which: FullMatrix, matrix: Matrix, low: int, high: int, sends: bool
    ) -> None:
        self.number, self.which, self.matrix = number, which, matrix
        self.low, self.high, self.sends = low, high, sends


class _RankRound:
    """This rank's part in one round of a plan: the pieces that it sends, assembles and receives."""

    def __init__(self, plan: Plan, round_: Round, axis: Axis, mine: Mapping[str, Matrix]) -> None:
        self.plan, self.round, self.axis = plan, round_, axis
        self.label = Label(f"bucket {round_.bucket}", "exchange")
        names = dict.fromkeys(plan.matrices[n].parameter for n in round_.matrices)
        self.slices = [mine[name] for name in names if mine[name].segment is not None]
        self.device = next(mine[name].param.device for name in names)
        me, members = axis.rank, plan.members[round_.cut]
        self.there: Splits = plan.splits(round_, me)
        self.back: Splits = plan.back(round_, me)
        self.pieces: list[_Piece] = []  # in the order of the messages: by owner
        for number in sorted(round_.matrices, key=lambda n: (plan.owners[n], n)):
            which = plan.matrices[number]
            low, high = plan.range_of(which, members[me])
            if low < high:
                matrix, sends = mine[which.parameter], plan.is_source(number, members[me])
                first = matrix.low
                self.pieces.append(_Piece(number, which, matrix, low - first, high - first, sends))
        self.owned = [n for n in round_.matrices if plan.owners[n] == me]
        # (sender, number, place on the cutting axis, low, high), as they arrive: by sender
        self._from = sorted(
            (i, n, member.cut, low, high)
            for n in self.owned
            for i, member, low, high in plan.sources(n)
        )
        self._to = sorted(
            (i, n, member.cut, low, high)
            for n in self.owned
            for i, member, low, high in plan.holders(n)
        )

    def matrices(self, arrived: Tensor) -> Iterator[tuple[int, FullMatrix, Tensor]]:
        """Yield (number, matrix, values) of each matrix that this rank owns."""
        where: dict[int, list[tuple[int, int, int, int]]] = {n: [] for n in self.owned}
        at = 0
        for _, number, place, low, high in self._from:
            where[number].append((place, low, high, at))
            at += high - low
        for number, pieces in where.items():
            which = self.plan.matrices[number]
            flats: dict[int, Tensor] = {}
            for place, low, high, at in pieces:
                part = part_at(which, place)
                assert part is not None
                if part.place not in flats:
                    flats[part.place] = arrived.new_empty(part.high - part.low)
                flats[part.place][low - part.low : high - part.low] = arrived[at : at + high - low]
            yield number, which, _assembled(which, flats, arrived)

    def updates(self, made: Mapping[int, Tensor], like: Tensor) -> Tensor:
        """Return the updates of this rank's matrices in the order of the messages: by receiver."""
        out = like.new_empty(sum(self.back.input))
        flats: dict[tuple[int, int], Tensor] = {}
        at = 0
        for _, number, place, low, high in self._to:
            part = part_at(self.plan.matrices[number], place)
            assert part is not None
            key = number, part.place
            if key not in flats:
                flat = made[number].new_zeros((part.high - part.low) // part.width, part.width)
                for cut in part.cuts:
                    own = made[number].narrow(cut.dim, cut.to, cut.size)
                    flat.narrow(cut.dim, cut.at, cut.size).copy_(own)
                flats[key] = flat.view(-1)
            out[at : at + high - low] = flats[key][low - part.low : high - part.low]
            at += high - low
        return out

    def pieces_back(self) -> Iterator[tuple[_Piece, tuple[int, int]]]:
        """Yield each piece, and the range of its update in the received tensor."""
        at = 0
        for piece in self.pieces:
            size = piece.high - piece.low
            yield piece, (at, at + size)
            at += size


def _assembled(which: FullMatrix, flats: Mapping[int, Tensor], like: Tensor) -> Tensor:
    """Assemble a matrix from its parts at all places of the cutting axis."""
    out = like.new_empty((which.rows, which.columns))
    for part in which.parts:
        if part.low == part.high:
            continue
        rows = flats[part.place].view(-1, part.width)
        for cut in part.cuts:
            own = rows.narrow(cut.dim, cut.at, cut.size)
            out.narrow(cut.dim, cut.to, cut.size).copy_(own)
    return out
