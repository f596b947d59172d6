# SPDX-License-Identifier: Apache-2.0
"""Lay a rank's parameters out in flat buckets: which ranks share them, and at which offsets.

Pure arithmetic, the same on every rank that shares a bucket. One collective covers a bucket. The
parameters of a bucket are cut over the same axis, so the same ranks hold the same part of them: a
bucket's gradients are summed over those ranks, which share it equally (Sharing). Parameters are in
reverse definition order, approximately the order in which backward finishes them, each at a
multiple of BLOCK elements. A bucket's length is a multiple of BLOCK times the number of ranks, so
that a share consists of whole blocks. A bucket has

    stages 0 to 2   parameters of one pipeline chunk, until there are `size` elements
    stage 3         parameters of one transformer block, or adjacent ones outside of any block
    late            parameters whose gradients are computed after backward (a deferred output layer)
    last            parameters whose gradient is also summed over another axis (tied embeddings over
                    the ends of a pipeline, norms under sequence parallelism), one bucket per axis

Frozen parameters (requires_grad is False) have separate buckets, which contain only weights. Below
stage 3 such a bucket is not divided among ranks, as it is never updated.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from mpu.grid import DATA
from mpu.param import group_of, placement_of

BLOCK = 1024  # elements; also the unit of the global norm
SMALLEST, LARGEST = 1 << 21, 40_000_000  # elements of an automatic bucket


@dataclass(frozen=True)
class ZeroConfig:
    """How gradients and weights are shared among data-parallel ranks."""

    zero_stage: int = 0
    bucket_size: int = 0  # approximate elements of a bucket; 0: automatic
    overlap_grad_reduce: bool = True  # reduce a bucket during backward; else all of them after it
    overlap_param_gather: bool = False  # prefetch weights during the computation before their use
    # reduce after every micro-batch, not once per step (stages 2 and 3; changes the bits)
    reduce_each_micro_batch: bool = False
    grad_reduce_dtype: torch.dtype | None = None  # dtype on the wire; None: the accumulation dtype
    # dtype of a rank's own accumulation over micro-batches; None: the accumulation dtype
    main_grads_dtype: torch.dtype | None = None
    # at stage 3 weights stay unsharded from their first use in a step to their last (pipelines,
    # whose chunks alternate)
    keep_unsharded: bool = False


class Sharing(NamedTuple):
    """Which ranks sum a bucket's gradients and share its state.

    cut: the axis that cuts its parameters. data: the axis of the ranks that hold the same part of
    them (mpu.grid.DATA), over which gradients are summed. ranks: the number of these ranks. shard:
    the number of ranks that share one instance of the state. zero_stage: in effect; 0 for shard 1.
    """

    cut: str = "tp"
    data: str = DATA["tp"]
    ranks: int = 1
    shard: int = 1
    zero_stage: int = 0


def sharing_of(cut: str, ranks: int, shard: int, zero_stage: int) -> Sharing:
    """Return the sharing of parameters cut by an axis of the grid; zero_stage: as requested."""
    return Sharing(cut, DATA[cut], ranks, shard, zero_stage if shard > 1 else 0)


class ParamEntry(NamedTuple):
    """One parameter of this rank."""

    name: str
    numel: int
    chunk: int = 0  # its pipeline chunk
    # axes over which its gradient is reduced before the data-parallel ranks
    axes: tuple[str, ...] = ()
    cut: str = "tp"  # the axis that cuts it
    group: str = ""  # the model's parameter group, for the optimizer
    late: bool = False  # its last gradient is computed after those of the rank's other parameters
    frozen: bool = False  # it has no gradient, and is reduced over no axis
    copies: bool = False  # other pipeline stages have it too, as they do a tied embedding

    def as_frozen(self) -> "ParamEntry":
        """Return the entry of the same parameter, if it is frozen."""
        return self._replace(axes=(), late=False, frozen=True)


def entries_of(
    named: Iterable[tuple[str, nn.Parameter]], chunk_of: Callable[[str], int] = lambda name: 0
) -> list[ParamEntry]:
    """Return a module's parameters as entries for `make_buckets`, in definition order.

    named: module.named_parameters(). chunk_of(name): the pipeline chunk of a parameter.
    """
    found = []
    for name, param in named:
        place = placement_of(param)
        axes = tuple(axis.name for axis in place.reduce_axes if axis.size > 1)
        entry = ParamEntry(
            name=name,
            numel=param.numel(),
            chunk=chunk_of(name),
            axes=axes,
            cut=place.axis.name,
            group=group_of(param),
            late=getattr(param, "late", False) and not axes,
            copies=bool(place.copies),
        )
        found.append(entry if param.requires_grad else entry.as_frozen())
    return found


class BucketLayout(NamedTuple):
    """One bucket of parameters."""

    params: tuple[tuple[str, int, int], ...]  # (name, offset, numel) of each
    length: int  # padded, in elements
    # axes over which its gradients are reduced before the ranks of `sharing`
    axes: tuple[str, ...] = ()
    sharing: Sharing = Sharing()
    groups: tuple[str, ...] = ()  # of its parameters
    late: bool = False  # as in ParamEntry, for all of them
    frozen: bool = False  # as in ParamEntry, for all of them

    @property
    def own(self) -> int:
        """Return the number of elements that a rank owns: its share; at stage 0 all."""
        return self.length // self.sharing.shard if self.sharing.zero_stage else self.length

    @property
    def sharded(self) -> bool:
        """Return whether a rank keeps only its share of the weights, gathered for each use."""
        return self.sharing.zero_stage == 3 and not self.axes

    def runs(self, separate: Collection[str] = ()) -> list[tuple[int, int, str]]:
        """Return [low, high) and group of each run of parameters of one group, padding included.

        Each parameter of the groups `separate` is a run of its own, without padding.
        """
        found: list[tuple[int, int, str]] = []
        ends = [start for _, start, _ in self.params[1:]] + [self.length]
        for (_, start, numel), group, end in zip(self.params, self.groups, ends, strict=True):
            if group in separate:
                found.append((start, start + numel, group))
            elif found and found[-1][2] == group:
                found[-1] = (found[-1][0], end, group)
            else:
                found.append((start, end, group))
        return found


def automatic_size(largest: int) -> int:
    """Return a bucket's size: an eighth of the `largest` rank's elements, within bounds."""
    return max(SMALLEST, min(LARGEST, largest // 8))


def block_of(name: str) -> str:
    """Return the transformer block of a parameter ("layers.3"), or "" outside of any."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: at + 1])


def make_buckets(
    entries: Sequence[ParamEntry], size: int, sharing: Mapping[str, Sharing]
) -> list[BucketLayout]:
    """Put parameters, given in definition order, into buckets, in the order of their reduction.

    size: approximate elements per bucket. sharing: by the axis that cuts a parameter; a bucket is
    padded to whole blocks for each rank of it.
    """
    groups: list[list[ParamEntry]] = []
    summed_twice: dict[tuple[tuple[str, ...], str], list[ParamEntry]] = {}
    latest: dict[tuple[str, bool], list[ParamEntry]] = {}  # the current group of each kind
    ordered = sorted(reversed(entries), key=lambda e: (e.late, -e.chunk))
    for entry in ordered:
        if entry.axes:
            summed_twice.setdefault((entry.axes, entry.cut), []).append(entry)
            continue
        by_block = sharing[entry.cut].zero_stage == 3
        kind = entry.cut, entry.frozen
        group = latest.get(kind, [])
        other = group and (group[-1].chunk, group[-1].late) != (entry.chunk, entry.late)
        if by_block:
            other = other or (group and block_of(group[-1].name) != block_of(entry.name))
            # a bucket of its own, so that its shares are equal on all stages that have it
            other = other or (group and (group[-1].copies or entry.copies))
        if not group or other or (not by_block and sum(e.numel for e in group) >= size):
            latest[kind] = []
            groups.append(latest[kind])
        latest[kind].append(entry)
    at = {entry.name: i for i, entry in enumerate(ordered)}
    groups.sort(key=lambda group: at[group[-1].name])  # a bucket is ready with its last parameter
    groups += [
        summed_twice[key]
        for key in sorted(summed_twice, key=lambda key: (_tp_last(key[0]), key[1]))
    ]
    return [_layout_of(group, sharing[group[0].cut]) for group in groups]


def _tp_last(axes: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    """Return a sort key, the same on every rank, that puts buckets summed over tp last."""
    return "tp" in axes, axes


def _layout_of(group: Sequence[ParamEntry], sharing: Sharing) -> BucketLayout:
    offset, params, frozen = 0, [], group[0].frozen
    if frozen and sharing.zero_stage < 3:
        sharing = sharing._replace(zero_stage=0)
    for entry in group:
        params.append((entry.name, offset, entry.numel))
        offset += -(-entry.numel // BLOCK) * BLOCK
    grain = BLOCK * sharing.ranks
    length, axes = -(-offset // grain) * grain, group[0].axes
    return BucketLayout(
        tuple(params),
        length,
        axes,
        sharing=sharing,
        groups=tuple(entry.group for entry in group),
        late=group[0].late,
        frozen=frozen,
    )


def gaps(layout: BucketLayout) -> list[tuple[int, int]]:
    """Return the padding [low, high) between a bucket's parameters and after the last."""
    ends = [offset + numel for _, offset, numel in layout.params]
    starts = [offset for _, offset, _ in layout.params[1:]] + [layout.length]
    return [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]
