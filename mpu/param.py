# SPDX-License-Identifier: Apache-2.0
"""Placement: which part of the full tensor a parameter is, and which ranks hold the rest.

A Placement is an attribute of the parameter itself. Checkpoints, initial weights, the global norm
and the sums of gradients (mpu/zero/reduce.py) are all derived from it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn

from mpu.comm.transport import Axis
from mpu.gradients import GradientSink


class PlacementError(ValueError):
    """A parameter does not match its Placement. The message names it and the remedy."""


class Region(Enum):
    """The region in which a replicated weight is used: which part of the activations a rank has.

    REPLICATED: every tp rank has all of them, so every rank's gradient is complete.
    SEQUENCE_PARALLEL: hidden states. Under sequence parallelism a rank has its part of s, and its
        gradient is partial; otherwise they are replicated.
    TENSOR_PARALLEL: between a column- and a row-parallel layer. A rank has its own heads or
        features, so its gradient is always partial.
    """

    REPLICATED = "replicated"
    SEQUENCE_PARALLEL = "sequence-parallel"
    TENSOR_PARALLEL = "tensor-parallel"


@dataclass(frozen=True)
class Piece:
    """A rectangle of a canonical tensor (one that a checkpoint names) that this rank holds.

    Rows [start, start + size) along `dim` of the tensor `name` of full `shape` are rows
    [local, local + size) along `dim` of the local parameter. `size` is 0 if a rank only has
    padding.
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
    dim: the cut dimension; None if every rank holds all of it.
    axis: the axis that cuts it or, if dim is None, over which it is replicated: tp, or ep for an
        expert. It determines which ranks sum its gradient and share its state (mpu.grid.DATA).
    sections: sizes along dim 0 of the tensors fused into this one (q, k, v; gate, up). Each is cut
        on its own, so that a checkpoint can name q_proj in any layout.
    whole_sections: the axis distributes sections instead of cutting each: rank r holds the r-th of
        `axis.size` equal runs of them (the matrices of experts).
    local_size: rows of this rank along `dim`, including padding; unused if dim is None.
    reduce_axes: axes over which gradients are added before the data-parallel ranks (norm weights
        under sequence parallelism: tp; tied embeddings: embd). LayerContext.replicated_parameter
        derives them from a Region.
    copies: axes over which other ranks hold the same part for another layer (embd).
    fused: how many adjacent `sections` one matrix product computes; 0: all of them. qkv: they are
        queries, keys and values. An optimizer of whole matrices updates sections one by one, or as
        they are fused.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    axis: Axis = Axis("tp")
    sections: tuple[int, ...] = ()
    local_size: int = 0
    reduce_axes: tuple[Axis, ...] = ()
    copies: tuple[Axis, ...] = ()
    whole_sections: bool = False
    fused: int = 0
    qkv: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part, including padding."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.local_size, *self.shape[self.dim + 1 :])

    @property
    def first_holder(self) -> bool:
        """Return True on the one rank, among those of `holders`, that counts it in the norm."""
        return all(axis.rank == 0 for axis in self.holders)

    @property
    def holders(self) -> tuple[Axis, ...]:
        """Return the axes, except data-parallel ones, over which ranks hold the same part."""
        return self.copies if self.dim is not None else (self.axis, *self.copies)

    def pieces(self, names: Sequence[str]) -> list[Piece]:
        """Return this rank's rectangles of the canonical tensors `names`: one per section, or per
        section that it holds.

        Sections with the same name form one tensor, stacked along dim 0. Raises PlacementError if
        these are cut by columns.
        """
        sizes = self.sections or (self.shape[0],)
        assert len(names) == len(sizes), (names, self.sections)
        found, local, t, r = [], 0, self.axis.size, self.axis.rank
        rows_of = Counter[str]()  # of each tensor
        each = []  # for each section: its tensor, its rows, its first row there
        for name, rows in zip(names, sizes, strict=True):
            each.append((name, rows, rows_of[name]))
            rows_of[name] += rows
        if self.dim and len(rows_of) < len(names):
            raise PlacementError(f"{names[0]}: sections cut by columns need different names")
        if self.whole_sections:  # this rank's run of sections, which are not cut
            run = len(sizes) // t
            each, t, r = each[r * run : (r + 1) * run], 1, 0
        for name, rows, first in each:
            shape = (rows_of[name], *self.shape[1:])
            if self.dim is None:
                found.append(Piece(name, shape, 0, first, rows, local))
                local += rows
                continue
            full = shape[self.dim] if self.dim else rows
            step = self.local_size if len(sizes) == 1 else full // t
            at = min(r * step, full)
            found.append(Piece(name, shape, self.dim, first + at, min(step, full - at), local))
            local += step
        return found


def divide(placement_dim: str, size: int, axis: Axis, what: str) -> int:
    """Return size / axis.size. Raises ValueError, which names `what`, if it is not an integer."""
    if size % axis.size:
        raise ValueError(
            f"{what} ({size}) must be a multiple of the {placement_dim} size ({axis.size})"
        )
    return size // axis.size


def parameter(
    placement: Placement,
    dtype: torch.dtype,
    device: torch.device,
    sink: GradientSink | None = None,
) -> nn.Parameter:
    """Return an uninitialised parameter with its placement; `sink` allocates its memory."""
    empty = torch.empty if sink is None else sink.empty
    param = nn.Parameter(empty(placement.local_shape, dtype=dtype, device=device))
    param.placement = placement  # type: ignore[attr-defined]
    return param


def placement_of(param: nn.Parameter) -> Placement:
    """Return the parameter's placement; a plain nn.Parameter counts as replicated."""
    return getattr(param, "placement", None) or Placement(tuple(param.shape))


def without_axis(name: str, param: nn.Parameter, world_size: int, ep_size: int) -> str:
    """Return why a parameter's gradient would not be summed on a Grid of these sizes, or ""."""
    if placement_of(param).axis.name != "ep" or ep_size or world_size == 1:
        return ""
    return (
        f"{name} is placed on the axis ep, which this run does not have, so its gradient would not "
        "be summed; set expert_model_parallel_size (Grid: ep_size)"
    )


# The groups that a model may put a parameter in. The first word selects the optimizer and the
# learning rate, the suffix whether weight decay applies (training/settings/update_rules.py).
GROUPS = ("matrix", "matrix_no_decay", "vector", "vector_decay", "embedding", "embedding_no_decay")
PLAIN = ("matrix_no_decay", "vector", "embedding_no_decay")  # those without weight decay


def name_groups(module: nn.Module, parameter_group: Callable[[str, nn.Parameter], object]) -> None:
    """Set each parameter's group to parameter_group(name, param) of the model's file.

    It may also return (weight decay applies, the decoupled learning rate applies), as model files
    did before groups had names. Raises ValueError for anything else.
    """
    for name, param in module.named_parameters():
        group = parameter_group(name, param)
        if isinstance(group, tuple) and [type(each) for each in group] == [bool, bool]:
            decay, decoupled = group
            group = "embedding" if decoupled else "matrix" if param.dim() > 1 else "vector"
            if decay != (group != "vector"):
                group += "_decay" if decay else "_no_decay"
        if group not in GROUPS:
            raise ValueError(
                f"parameter_group of the --model-file returns {group!r} for {name}: it must name "
                f"one of {', '.join(GROUPS)}"
            )
        param.group = group  # type: ignore[attr-defined]


def group_of(param: nn.Parameter) -> str:
    """Return the parameter's group; by default "matrix" or "vector", by its dimensions."""
    return getattr(param, "group", "") or ("matrix" if param.dim() > 1 else "vector")


def times(group: str, lr_mult: float, wd_mult: float) -> str:
    """Return the name of a group whose learning rate and weight decay are multiplied by these."""
    return group if lr_mult == wd_mult == 1 else f"{group} {lr_mult!r} {wd_mult!r}"


def factors_of(group: str) -> tuple[float, float]:
    """Return the multipliers of a group's learning rate and weight decay."""
    _, *factors = group.split(" ")
    lr_mult, wd_mult = factors or (1.0, 1.0)
    return float(lr_mult), float(wd_mult)


def model_group(group: str) -> str:
    """Return the member of GROUPS from which `times` may have made a group."""
    return group.partition(" ")[0]


def decays(group: str) -> bool:
    """Return whether weight decay applies to a group."""
    return model_group(group) not in PLAIN


def tie(param: nn.Parameter, axis: Axis) -> None:
    """Declare that the ranks of `axis` hold this weight for other layers: sum its gradients.

    Raises PlacementError if they are already summed over that axis.
    """
    place = placement_of(param)
    if axis.name in (reduced.name for reduced in place.reduce_axes):
        raise PlacementError(
            f"a weight of shape {list(place.shape)} is tied over {axis.name} twice: its gradient "
            "would be summed twice"
        )
    param.placement = replace(  # type: ignore[attr-defined]
        place, reduce_axes=(*place.reduce_axes, axis), copies=(*place.copies, axis)
    )


def unique_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) once each, in definition order, tied ones under their first name."""
    yield from module.named_parameters(remove_duplicate=True)


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of the buffers in torch's state_dict: state that training changes, but
    not the optimizer. Every rank of a stage holds the same.
    """
    saved = module.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in saved)


@torch.no_grad()
def draw_normal(param: nn.Parameter, names: Sequence[str], std: float, seed: int) -> None:
    """Fill with N(0, std^2) drawn per (seed, canonical name) on the unpadded full shape, then cut.

    The initial model is thus the same, bit for bit, for every layout (per device type and torch
    version). Each block of rows has its own generator, so a rank only draws the blocks of which it
    holds a part. Padding is 0. Nothing is drawn for a meta tensor.
    """
    param.zero_()
    if param.is_meta:
        return
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
    """Return a 63-bit seed from the arguments alone: FNV-1a, 64 bits, without its last bit."""
    value = 0xCBF29CE484222325
    for byte in f"{seed}/{name}/{block}".encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1
