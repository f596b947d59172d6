# SPDX-License-Identifier: Apache-2.0
"""Let the parts of a matmul's input, or of its output, travel while it runs.

    replicated   no part travels, x is whole on every rank (no sequence parallelism); sums are
                 all-reduced
    none         the collective, then the matmul: the reference
    ring         a part a rank by messages: the next one arrives while this one multiplies
    symmetric    parts lie in memory that all ranks see (mpu/comm/workspace.py): one behind the
                 other, so that they are multiplied together where they lie; what is scattered is
                 written there once. On GPUs: mpu/comm/paths_cuda.py
    auto         for each shape the one that was chosen

ring multiplies one part at a time: the own one first where parts arrive and last where they leave,
in between the next rank's and so on round. Shared memory has nothing to hide but a rank that is
late, and halves of a matmul cost more than the whole. A sum adds the ranks' parts in rank order,
16-bit ones in fp32. mpu/comm/overlap.py puts gather and scatter together with their gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu.comm.collectives import all_gather, all_reduce, reduce_scatter
from mpu.comm.handle import DONE, Handle, Label, start
from mpu.comm.in_memory import sum_of_parts
from mpu.comm.p2p import exchange
from mpu.grid import Axis


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., i] times weight^T, weight [o, i] -> [..., o].

    In fp32 on a CPU by oneDNN's linear, the operator that torch's own compiler emits there: MKL's
    sgemm, which F.linear calls, is slower by a tenth to a third on these shapes. Everything else is
    F.linear.
    """
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if onednn is None or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight)
    return onednn(x, weight, None, "none", [], "")


class Gathering(ABC):
    """x of all ranks, on its way to this one. `close` when nothing of it is read any more."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.x, self.axis = x, axis

    @abstractmethod
    def whole(self) -> Tensor:
        """Wait for all of it: [t n, ...]."""

    def close(self) -> None:  # noqa: B027 - where nothing is held, there is nothing to do
        """Let go of the memory that it arrived in."""

    def multiply(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return gather(x) w^T for each w."""
        return [product(self.whole(), w) for w in weights]


class Path(ABC):
    """How parts travel over an axis."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def of(self, op: str, x: Tensor, width: int) -> "Path":
        """Return the path that this operation on x takes (see `key`)."""
        return self

    @abstractmethod
    def gather(self, x: Tensor, label: Label | None = None) -> Gathering:
        """Start x on its way to every rank, there to be multiplied."""

    def gather_again(self, x: Tensor, label: Label | None = None) -> Gathering:
        """Start x on its way to every rank, while something else is multiplied."""
        return self.gather(x, label)

    @abstractmethod
    def multiply_scatter(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor], label: Label | None = None
    ) -> tuple[Tensor, Handle]:
        """Start the sum over ranks of sum_i x_i w_i^T on its way to the owners of its rows."""


def _sum_of_products(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = product(xs[0], weights[0])
    for x, w in zip(xs[1:], weights[1:], strict=True):
        total += product(x, w)
    return total


class _Whole(Gathering):
    """All of it at once: by one collective, or there already."""

    def __init__(self, x: Tensor, axis: Axis, full: Tensor, handle: Handle) -> None:
        super().__init__(x, axis)
        self._full, self._handle = full, handle

    def whole(self) -> Tensor:
        self._handle.wait()
        return self._full


class Replicated(Path):
    """x is whole on every rank; partial products are all-reduced."""

    def gather(self, x: Tensor, label: Label | None = None) -> Gathering:
        return _Whole(x, self.axis, x, DONE)

    def multiply_scatter(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor], label: Label | None = None
    ) -> tuple[Tensor, Handle]:
        return all_reduce(_sum_of_products(xs, weights), self.axis, async_op=True, label=label)


class Separate(Path):
    """The collective, then the matmul; the matmul, then the collective."""

    def gather(self, x: Tensor, label: Label | None = None) -> Gathering:
        return _Whole(x, self.axis, *all_gather(x, self.axis, async_op=True, label=label))

    def multiply_scatter(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor], label: Label | None = None
    ) -> tuple[Tensor, Handle]:
        return reduce_scatter(_sum_of_products(xs, weights), self.axis, async_op=True, label=label)


class _RingGathering(Gathering):
    """Each rank passes on to the left what came from the right."""

    def __init__(self, x: Tensor, axis: Axis, label: Label | None) -> None:
        super().__init__(x, axis)
        self._full = x.new_empty((axis.size, *x.shape))
        self._full[axis.rank] = x
        self._turns, self._label = [axis.rank, *axis.following], label
        self._here = 1
        self._coming = self._pass_on(0)

    def _pass_on(self, i: int) -> Handle:
        if i + 1 == self.axis.size:
            return DONE
        left, right = (self.axis.rank - 1) % self.axis.size, (self.axis.rank + 1) % self.axis.size
        into = self._full[self._turns[i + 1]]
        return exchange(self._full[self._turns[i]], self.axis, left, right, into, self._label)

    def multiply(self, weights: Sequence[Tensor]) -> list[Tensor]:
        n, size = self.x.shape[0], self.axis.size
        out = [self.x.new_empty((size * n, *self.x.shape[1:-1], w.shape[0])) for w in weights]
        for rank, part in self._parts():
            for y, w in zip(out, weights, strict=True):
                y[rank * n : (rank + 1) * n] = product(part, w)
        return out

    def _parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its x), own first, each when it is here and the next one is on its way."""
        for i, rank in enumerate(self._turns):
            if i == self._here:
                self._coming.wait()
                self._here += 1
                self._coming = self._pass_on(i)
            yield rank, self._full[rank]

    def whole(self) -> Tensor:
        for _ in self._parts():
            pass
        return self._full.flatten(0, 1)


class Ring(Path):
    """Parts as messages: gathered round the ring, scattered straight to their owners."""

    def gather(self, x: Tensor, label: Label | None = None) -> Gathering:
        return _RingGathering(x, self.axis, label)

    def multiply_scatter(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor], label: Label | None = None
    ) -> tuple[Tensor, Handle]:
        rank, size = self.axis.rank, self.axis.size
        n = xs[0].shape[0] // size
        parts, flying = None, []
        for i, owner in enumerate([*self.axis.following, rank], 1):
            mine = _sum_of_products([x[owner * n : (owner + 1) * n] for x in xs], weights)
            if parts is None:
                parts = mine.new_empty((size, *mine.shape))
            if owner == rank:
                parts[rank] = mine
            else:
                source = (rank - i) % size
                flying.append(exchange(mine, self.axis, owner, source, parts[source], label))
        assert parts is not None
        out = torch.empty_like(parts[0])

        def finish() -> None:
            for handle in flying:
                handle.wait()
            sum_of_parts(parts, out)

        return out, Handle(finish=finish)


class _SharedGathering(Gathering):
    """Each rank writes its part where all see it."""

    def __init__(self, x: Tensor, axis: Axis, label: Label | None) -> None:
        super().__init__(x, axis)
        self._turn: Any = None
        self._copy: Tensor | None = None

        def call() -> Any:
            self._turn = axis.memory.begin(x.nbytes)
            self._turn.complete = self._save
            self._turn.put(x)
            return self._turn

        self._handle = start("all_gather", axis, x, call, (x,), None, True, label)

    def whole(self) -> Tensor:
        self._handle.wait()
        if self._copy is not None:
            return self._copy
        shape = (self.axis.size * self.x.shape[0], *self.x.shape[1:])
        return self._turn.whole(shape, self.x.dtype)

    def close(self) -> None:
        self._turn.close()

    def _save(self) -> None:
        """Copy what a later turn is about to overwrite."""
        self._copy = self.whole().clone()
        self._turn.close()


class Symmetric(Separate):
    """Parts in memory that all ranks see: multiplied where they lie. A sum is that of `none`: what
    leaves is written there once, and added where it lies.
    """

    def gather(self, x: Tensor, label: Label | None = None) -> Gathering:
        return _SharedGathering(x, self.axis, label)


PATHS: dict[str, type[Path]] = {"none": Separate, "ring": Ring, "symmetric": Symmetric}


class Auto(Separate):
    """The path that was chosen for an operation and its shape.

    Where nothing was, `none`, and that is added to the choices for the trainer to tell.
    """

    def __init__(self, axis: Axis, choices: dict[str, str]) -> None:
        super().__init__(axis)
        self.choices = choices

    def of(self, op: str, x: Tensor, width: int) -> Path:
        rows = x.shape[:-1].numel() // (1 if op == "gather" else self.axis.size)
        name = self.choices.setdefault(key(op, rows, x.shape[-1], width, x.dtype), "none")
        return path_called(name, self.axis).of(op, x, width)


def key(op: str, rows: int, k: int, width: int, dtype: torch.dtype) -> str:
    """Name a matmul with its collective: op `gather` or `scatter`, rows of one part, x [rows, k]
    and weights [width, k] of one rank.
    """
    return f"{op} {rows}x{k} -> {width} {str(dtype).removeprefix('torch.')}"


def path_called(name: str, axis: Axis) -> Path:
    """Return the path of that name; on GPUs symmetric is that of the kernels."""
    if name == "symmetric" and axis.kernels is not None:
        from mpu.comm.paths_cuda import Kernels  # which needs triton

        return Kernels(axis)
    return PATHS[name](axis)


def path_of(mode: str, choices: dict[str, str], axis: Axis, cut: bool) -> Path:
    """Return the path of a linear layer. cut: x is cut along its rows (sequence parallelism).

    Where ranks do not reach one another's memory, symmetric is ring.
    """
    if not cut:
        return Replicated(axis)
    if mode == "auto":
        return Auto(axis, choices)
    return path_called("ring" if mode == "symmetric" and not axis.symmetric else mode, axis)
