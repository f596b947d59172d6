# SPDX-License-Identifier: Apache-2.0
"""Describe a rank's part of a checkpoint as rectangles of canonical tensors.

A checkpoint has no notion of ranks, fused sections or padding, so any layout can read what any
other wrote. Optimizer state has its parameter's name and shape: `model.norm.weight.exp_avg`.
"""

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from mpu.comm.transport import Axis
from mpu.grid import Grid
from mpu.param import placement_of, saved_buffers, unique_parameters

HEADER_LIMIT, NAMES = 1 << 24, 100_000  # of a safetensors file: most bytes of its header, tensors


@dataclass(frozen=True, eq=False)
class NamedPiece:
    """One rectangle of the canonical tensor `name` of full `shape`."""

    name: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]  # its first index in each dimension
    sizes: tuple[int, ...]  # its length in each dimension
    tensor: Tensor  # the local data, shaped `sizes`; may be a view, as loading writes through it
    # axes over which other ranks hold the same rectangle; one of them writes it
    holders: tuple[Axis, ...] = ()
    # loads the data of a piece whose `tensor` is on the meta device when it is written
    # (tools/checkpoint.py, in bounded memory)
    fetch: Callable[[], Tensor] | None = None
    # a checkpoint may lack it, or have another length of its last dimension with the same first
    # elements; elements that it lacks are not changed
    optional: bool = False

    def __post_init__(self) -> None:
        assert tuple(self.tensor.shape) == self.sizes, (self.name, self.tensor.shape, self.sizes)
        assert len(self.shape) == len(self.starts) == len(self.sizes), self.name

    @property
    def key(self) -> str:
        """The name inside a safetensors file: the canonical one if the tensor is whole."""
        if self.sizes == self.shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.starts))}"

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def data(self) -> Tensor:
        """Return the values to write."""
        return self.tensor if self.fetch is None else self.fetch()


def state_name(parameter: str, kind: str) -> str:
    """Return the name of a parameter's state of a kind; kind "" is the parameter itself."""
    return f"{parameter}.{kind}" if kind else parameter


def is_state(name: str, index: Container[str]) -> bool:
    """Return whether a tensor of a checkpoint is optimizer state of a parameter in its `index`."""
    return name.rpartition(".")[0] in index


def whole(name: str, tensor: Tensor, fetch: Callable[[], Tensor] | None = None) -> NamedPiece:
    """Return the piece that covers a whole tensor."""
    shape = tuple(tensor.shape)
    return NamedPiece(name, shape, (0,) * len(shape), shape, tensor, fetch=fetch)


def parameter_pieces(
    parameters: Iterable[tuple[str, nn.Parameter]],
    names: Mapping[str, Sequence[str]],
    grid: Grid,
) -> list[NamedPiece]:
    """List the rectangles of this rank's parameters.

    parameters: mpu.param.unique_parameters(model). names: the model's table from parameter name to
    the canonical names of its fused sections (hf_names(model)).
    """
    return [
        piece
        for name, param in parameters
        for piece in _cut(
            param, param.detach(), names[name], "", grid.data(placement_of(param).axis.name).every
        )
    ]


def weight_pieces(
    model: nn.Module, names: Mapping[str, Sequence[str]], grid: Grid
) -> list[NamedPiece]:
    """List the rectangles of this rank's part of a model: its parameters and its buffers."""
    return [
        *parameter_pieces(unique_parameters(model), names, grid),
        *buffer_pieces(model, names, grid),
    ]


def buffer_pieces(
    model: nn.Module, names: Mapping[str, Sequence[str]], grid: Grid
) -> list[NamedPiece]:
    """List a model's buffers, which every rank of tp x dp x cp holds whole."""
    holders = (grid.tp, grid.dp_cp)
    return [
        replace(whole(names[name][0], buffer), holders=holders)
        for name, buffer in saved_buffers(model)
    ]


def load_pieces(
    counts: Iterable[tuple[str, Tensor]], names: Mapping[str, Sequence[str]], grid: Grid
) -> list[NamedPiece]:
    """List the numbers of tokens of each expert in the last step.

    counts: (name of the router's weight, numbers of tokens). A checkpoint may lack them.
    """
    found = []
    for name, count in counts:
        piece = whole(state_name(names[name][0], "tokens_per_expert"), count)
        found.append(replace(piece, holders=(grid.tp, grid.dp_cp), optional=True))
    return found


def state_pieces(
    named_state: Iterable[tuple[str, str, int, Tensor]],
    parameters: Iterable[tuple[str, nn.Parameter]],
    names: Mapping[str, Sequence[str]],
    holders: Callable[[nn.Parameter], Axis],
) -> list[NamedPiece]:
    """List the rectangles of this rank's optimizer state.

    named_state: (parameter name, kind, first, values), kind that of state, or "" for the parameter
    itself: elements [first, first + n) of the flattened local parameter. holders(param): the
    data-parallel ranks that hold the same elements (ParamAndGradBuffer.holders).
    """
    by_name = dict(parameters)
    found = []
    for name, kind, first, values in named_state:
        assert "." not in kind, kind  # else the parameter's name could not be cut from the state's
        param = by_name[name]
        for corner, part in rectangles(tuple(param.shape), first, values.detach()):
            found += _cut(param, part, names[name], kind, holders(param), corner)
    return found


def rectangles(
    shape: tuple[int, ...], first: int, values: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Cut elements [first, first + n) of a flattened tensor into rectangles of it, at most three of
    a matrix.

    Yield (first index in each dimension, view) for the rest of a row begun, the whole rows, and a
    row not ended.
    """
    rest = shape[1:]
    width = prod(rest)
    at, end = first, first + len(values)
    while at < end:
        row, begun = divmod(at, width)
        whole_rows = 0 if begun else (end - at) // width
        stop = at + whole_rows * width if whole_rows else min(end, (row + 1) * width)
        part = values[at - first : stop - first]
        if whole_rows:
            yield (row, *(0,) * len(rest)), part.view(whole_rows, *rest)
        else:
            for corner, view in rectangles(rest, begun, part):
                yield (row, *corner), view[None]
        at = stop


def amax_pieces(
    amaxes: Iterable[tuple[str, Tensor]], names: Mapping[str, Sequence[str]], grid: Grid
) -> list[NamedPiece]:
    """List the amax histories of delayed float8, whole on each rank of tp x dp x cp.

    amaxes: (parameter name, history). A history has the name of its parameter's first section. A
    checkpoint may lack it.
    """
    found = []
    for name, history in amaxes:
        piece = whole(state_name(names[name][0], "amax_history"), history)
        found.append(replace(piece, holders=(grid.tp, grid.dp_cp), optional=True))
    return found


def _cut(
    param: nn.Parameter,
    tensor: Tensor,
    names: Sequence[str],
    kind: str,
    data: Axis,
    corner: tuple[int, ...] = (),
) -> list[NamedPiece]:
    """Cut a rectangle of the local parameter by the parameter's placement; padding is left out.

    data: the data-parallel ranks that hold it. corner: the index in each dimension of the local
    parameter at which the rectangle begins; (): it is the whole parameter.
    """
    place = placement_of(param)
    holders = (data, *place.holders)
    corner = corner or (0,) * tensor.dim()
    found = []
    for piece in place.pieces(names):
        # the intersection of this rectangle and the piece, along the dimension that is cut
        begin = corner[piece.dim]
        low = max(begin, piece.local)
        high = min(begin + tensor.shape[piece.dim], piece.local + piece.size)
        if low >= high:
            continue
        view = tensor.narrow(piece.dim, low - begin, high - low)
        starts = list(corner)
        starts[piece.dim] = piece.start + low - piece.local
        found.append(
            NamedPiece(
                state_name(piece.name, kind),
                piece.shape,
                tuple(starts),
                tuple(view.shape),
                view,
                holders,
            )
        )
    return found


def share(pieces: Sequence[NamedPiece]) -> list[NamedPiece]:
    """Return the pieces that this rank writes: each has one writer, and bytes are balanced.

    Every holder walks the same list and assigns each piece to the holder with the fewest bytes so
    far, so no message is needed. Pieces with the same holders must be in the same order on all of
    them.
    """
    mine: list[NamedPiece] = []
    loads: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for piece in pieces:
        axes = [axis for axis in piece.holders if axis.size > 1]
        me, count = 0, 1
        for axis in axes:
            me, count = me * axis.size + axis.rank, count * axis.size
        load = loads.setdefault(tuple(axis.ranks for axis in axes), [0] * count)
        writer = load.index(min(load))
        load[writer] += piece.nbytes
        if writer == me:
            mine.append(piece)
    return mine


def into_files(pieces: Sequence[NamedPiece], limit: int) -> list[list[NamedPiece]]:
    """Group pieces, in order, into files of at most `limit` bytes; a larger one has its own.

    No file has more tensors, or a longer header, than a reader accepts (header.py).
    """
    files: list[list[NamedPiece]] = []
    room = header = 0
    for piece in pieces:
        # at most: the key, 20 digits a number, and the words between them
        entry = len(json.dumps(piece.key)) + 21 * len(piece.sizes) + 100
        if not files or piece.nbytes > room or entry > header or len(files[-1]) == NAMES:
            files.append([])
            room, header = limit, HEADER_LIMIT - 100  # less its metadata
        files[-1].append(piece)
        room -= piece.nbytes
        header -= entry
    return files


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype."""
    return DTYPES[dtype]


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
