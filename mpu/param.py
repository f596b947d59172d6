# SPDX-License-Identifier: Apache-2.0
"""Say what a parameter knows of its place, and where its gradient goes.

A layer never touches `.grad`. In backward it hands its weight gradient to a GradientSink, which
knows the buckets, the micro-batches and the data-parallel ranks. What must still be summed
afterwards, and over whom, is written on the parameter itself as a Placement.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpu.grid import Axis


@dataclass(frozen=True)
class Piece:
    """A rectangle of a canonical tensor that this rank holds.

    Rows [start, start + size) along `dim` of the tensor `name` of full `shape` stand in the local
    parameter at rows [local, local + size) along `dim`. `size` may be 0 where only padding falls to
    this rank.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    size: int
    local: int


@dataclass(frozen=True)
class Placement:
    """How the full tensor is cut over an axis, and over which axes its gradient is a partial sum.

    shape: full logical shape, unpadded, sections stacked along dim 0.
    dim: the cut dimension; None where every rank holds all of it.
    axis: the axis that cuts it.
    sections: sizes along dim 0 of the tensors fused into this one (q, k, v; gate, up); each is cut
    on its own,
        so a checkpoint can speak of q_proj whatever the layout.
    local_size: rows of this rank along `dim`, padding included.
    reduce_axes: axes over which the ranks' gradients must be added (norm weights under sequence
    parallelism, tied embeddings over the two ends of the pipeline).
    copies: axes over which other ranks hold the same part for a layer of their own (tied
    embeddings).
    """

    shape: tuple[int, ...]
    dim: int | None = None
    axis: Axis = Axis("tp")
    sections: tuple[int, ...] = ()
    local_size: int = 0
    reduce_axes: tuple[Axis, ...] = ()
    copies: tuple[Axis, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part, padding included."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.local_size, *self.shape[self.dim + 1 :])

    @property
    def first_holder(self) -> bool:
        """True on the one rank that counts a replicated parameter."""
        return all(axis.rank == 0 for axis in self.holders)

    @property
    def holders(self) -> tuple[Axis, ...]:
        """Axes, data-parallel ones apart, over which other ranks hold the very same part."""
        return self.copies if self.dim is not None else (self.axis, *self.copies)

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """List the rectangles of the canonical tensors `names`, one name a section."""
        sizes = self.sections or (self.shape[0],)
        assert len(names) == len(sizes), (names, self.sections)
        found, local, t, r = [], 0, self.axis.size, self.axis.rank
        for name, rows in zip(names, sizes, strict=True):
            shape = (rows, *self.shape[1:])
            if self.dim is None:
                found.append(Piece(name, shape, 0, 0, rows, 0))
                continue
            full = shape[self.dim]
            step = self.local_size if len(sizes) == 1 else full // t
            start = min(r * step, full)
            found.append(Piece(name, shape, self.dim, start, min(step, full - start), local))
            local += step
        return found


def cut(placement_dim: str, size: int, axis: Axis, what: str) -> int:
    """Divide `size` by the axis or say which rule broke. Returns the local size."""
    if size % axis.size:
        raise ValueError(
            f"{what} ({size}) must be a multiple of the {placement_dim} size ({axis.size})"
        )
    return size // axis.size


def parameter(
    placement: Placement,
    dtype: torch.dtype,
    device: torch.device,
    sink: "GradientSink | None" = None,
) -> nn.Parameter:
    """Make a parameter, unset, that carries its placement; `sink` says what memory it has."""
    empty = torch.empty if sink is None else sink.empty
    param = nn.Parameter(empty(placement.local_shape, dtype=dtype, device=device))
    param.placement = placement  # type: ignore[attr-defined]
    return param


def placement_of(param: nn.Parameter) -> Placement:
    """Return the parameter's placement; a plain nn.Parameter is replicated, its gradient whole."""
    return getattr(param, "placement", None) or Placement(tuple(param.shape))


def tie(param: nn.Parameter, axis: Axis) -> None:
    """Say that each rank of `axis` holds this weight for another layer: the gradients add up."""
    place = placement_of(param)
    param.placement = replace(  # type: ignore[attr-defined]
        place, reduce_axes=(*place.reduce_axes, axis), copies=(*place.copies, axis)
    )


def unique_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) once each, in definition order, tied ones under their first name."""
    yield from module.named_parameters(remove_duplicate=True)


@torch.no_grad()
def draw_normal(param: nn.Parameter, names: Sequence[str], std: float, seed: int) -> None:
    """Fill with N(0, std^2) drawn per (seed, canonical name) on the unpadded full shape, then cut.

    The initial model is thus the same, bit for bit, for every layout (per device type and torch
    version). The draw goes by blocks of rows with a generator each, so a rank only draws blocks it
    holds. Padding is 0.
    """
    param.zero_()
    for piece in placement_of(param).pieces(names):
        rows, width = piece.shape[0], max(1, torch.Size(piece.shape[1:]).numel())
        block = max(1, (1 << 20) // width)
        for first in range(0, rows, block):
            count = min(block, rows - first)
            if piece.dim == 0 and (
                first >= piece.start + piece.size or first + count <= piece.start
            ):
                continue
            generator = torch.Generator(param.device)
            generator.manual_seed(_hash(seed, piece.name, first))
            full = torch.empty((count, *piece.shape[1:]), dtype=torch.float32, device=param.device)
            full.normal_(0.0, std, generator=generator)
            if piece.dim == 0:
                low, high = max(first, piece.start), min(first + count, piece.start + piece.size)
                at = piece.local + low - piece.start
                param[at : at + high - low].copy_(full[low - first : high - first])
            else:
                target = param[first : first + count].narrow(piece.dim, piece.local, piece.size)
                target.copy_(full.narrow(piece.dim, piece.start, piece.size))


def _hash(seed: int, name: str, block: int) -> int:
    """FNV-1a of the text, 64 bits: a seed that depends on nothing but its arguments."""
    value = 0xCBF29CE484222325
    for byte in f"{seed}/{name}/{block}".encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1


class GradientSink:
    """Where layers put weight gradients: one main gradient a parameter, in the accumulation dtype.

    This base class keeps each in a tensor of its own and knows nothing of other ranks;
    mpu/zero/buckets.py keeps them in flat buckets and reduces a bucket when its last gradient of
    the step is done.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.main: dict[nn.Parameter, Tensor] = {}
        self._written: set[nn.Parameter] = set()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what a new weight lies in; ZeRO level 3 gives it no memory yet."""
        return torch.empty(shape, dtype=dtype, device=device)

    def materialize(self, param: nn.Parameter) -> Tensor:
        """Return the whole local weight; a sharding sink gathers it here (ZeRO level 3)."""
        return param

    def is_sharded(self, param: nn.Parameter) -> bool:
        """Say whether the weight is whole only between `materialize` and `release`."""
        return False

    def release(self, param: nn.Parameter) -> None:
        """Say that the weight is not needed for now (ZeRO level 3 frees it)."""

    def begin_step(self, micro_batches: int = 1) -> None:
        """Forget the old gradients: the step's first contribution overwrites, no zeroing pass."""
        self._written.clear()

    def main_grad(self, param: nn.Parameter) -> Tensor:
        """Return the parameter's main gradient, allocated at first use."""
        if param not in self.main:
            self.main[param] = torch.empty(param.shape, dtype=self.dtype, device=param.device)
        return self.main[param]

    def _fresh(self, param: nn.Parameter) -> bool:
        fresh = param not in self._written
        self._written.add(param)
        return fresh

    def accumulate(self, param: nn.Parameter, x: Tensor, dy: Tensor) -> None:
        """Add dy^T x: x [n, in], dy [n, out] -> main gradient [out, in].

        Same dtype: one matmul that accumulates in place. bf16 on CUDA: the product comes out in
        fp32; on CPU it is rounded to bf16, then added in fp32 (docs/numerics.md).
        """
        main, fresh = self.main_grad(param), self._fresh(param)
        if x.dtype == main.dtype:
            if fresh:
                torch.mm(dy.t(), x, out=main)
            else:
                main.addmm_(dy.t(), x)
        else:
            turned = dy.t()
            product = (
                torch.mm(turned, x, out_dtype=main.dtype) if x.is_cuda else torch.mm(turned, x)
            )
            main.copy_(product) if fresh else main.add_(product)

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """Add a ready gradient."""
        main = self.main_grad(param)
        main.copy_(grad) if self._fresh(param) else main.add_(grad)

    def add_rows(self, param: nn.Parameter, rows: Tensor, grad: Tensor) -> None:
        """Add grad[i] to row rows[i]: rows [n], grad [n, h]."""
        main = self.main_grad(param)
        if self._fresh(param):
            main.zero_()
        main.index_add_(0, rows, grad.to(main.dtype))

    def done(self, param: nn.Parameter) -> None:
        """Say that this use of the parameter has given all its gradient of one micro-batch."""


class _Use(torch.autograd.Function):
    """Identity forward; backward hands the gradient to the sink instead of `.grad`."""

    @staticmethod
    def forward(f: Any, param: nn.Parameter, sink: GradientSink) -> Tensor:
        f.param, f.sink = param, sink
        whole = sink.materialize(param)
        # autograd may keep what it is given: a weight that comes and goes is copied
        given = whole.clone() if sink.is_sharded(param) else whole.view_as(param)
        sink.release(param)
        return given

    @staticmethod
    def backward(f: Any, grad: Tensor) -> tuple[None, None]:
        f.sink.add(f.param, grad)
        f.sink.done(f.param)
        return None, None


def use(param: nn.Parameter, sink: GradientSink) -> Tensor:
    """Use a parameter in ordinary autograd code: its gradient goes to the sink. For new layers in a
    fork. At ZeRO level 3 what it returns is a copy.
    """
    return _Use.apply(param, sink)


class WeightGradientQueue:
    """Run weight gradients at once, or keep those of a backward until the pipeline engine says W.

    The engine runs the W's of a stage in the order of the micro-batches, so deferring changes no
    bit.
    """

    def __init__(self) -> None:
        self._kept: deque[Callable[[], None]] | None = None

    def put(self, work: Callable[[], None], kept: Sequence[Tensor] = ()) -> None:
        """Run one weight gradient, or keep it. kept: the tensors that `work` holds until it runs,
        for a queue that counts their bytes."""
        if self._kept is None:
            work()
        else:
            self._kept.append(work)

    @property
    def deferring(self) -> bool:
        """True between `defer()` and `take()`."""
        return self._kept is not None

    def defer(self) -> None:
        """Keep what is put from now on."""
        assert self._kept is None, "one backward at a time defers"
        self._kept = deque()

    def take(self) -> "deque[Callable[[], None]]":
        """Stop keeping, and hand over what was kept, oldest first."""
        assert self._kept is not None, "nothing was deferred"
        kept, self._kept = self._kept, None
        return kept


@torch.no_grad()  # as in backward
def run_deferred(works: "deque[Callable[[], None]]") -> None:
    """Run weight gradients that were kept, and free what each held as soon as it is done."""
    while works:
        works.popleft()()
